"""Mine chat-shaped pairs from Python source and its documentation.

The demo model has to answer *something* sensible when the chat template is used, and no
outside conversation data may be shipped.  The standard library already holds questions with
known answers: every docstring answers "what does this do?", every short function answers
"write a function that ...", and the reference manual answers both in better prose.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import textwrap
from collections.abc import Iterator

Message = dict[str, str]
Chat = list[Message]

SYSTEM_PROMPT = "You are a helpful assistant that knows the Python standard library."
MAX_ANSWER = 900
MAX_SOURCE = 1200

WHAT = ("What does {n} do?", "What is {n} for?", "Explain {n}.", "Tell me about {n}.")
MODULE = ("Explain the module {n}.", "What is the {n} module for?", "What does {n} offer?")
SHOW = ("Show me its source.", "How is it implemented?", "Can you show the code?")
ARGS = ("What arguments does {n} take?", "How do I call {n}?")


def chat(*turns: str) -> Chat:
    """Alternate user and assistant turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def shorten(text: str, limit: int = MAX_ANSWER) -> str:
    """Keep whole paragraphs up to ``limit`` so that an answer never stops mid-sentence."""
    kept: list[str] = []
    size = 0
    for para in text.strip().split("\n\n"):
        if kept and size + len(para) > limit:
            break
        kept.append(para.rstrip())
        size += len(para) + 2
    answer = "\n\n".join(kept)
    return answer if len(answer) <= 2 * limit else ""


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """``name(args)`` as a caller would read it."""
    args = ast.unparse(node.args)
    args = re.sub(r"^(self|cls)(, |$)", "", args)
    return f"{node.name}({args})"


def first_line(doc: str) -> str:
    """The docstring's summary, phrased so that it can follow 'that ...'."""
    line = doc.strip().split("\n\n")[0].replace("\n", " ").strip().rstrip(".")
    return line[:1].lower() + line[1:] if line[1:2].islower() else line


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield (qualified name, node) of top-level and class-level definitions."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if not isinstance(node, kinds):
            continue
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            for sub in node.body:
                if isinstance(sub, kinds[:2]):
                    yield f"{node.name}.{sub.name}", sub


def fenced(source: str) -> str:
    """Code the way chat models present it."""
    return f"```python\n{source.rstrip()}\n```"


def node_source(lines: list[str], node: ast.AST) -> str:
    """Dedented source of a definition, decorators included."""
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    return textwrap.dedent("\n".join(lines[start : node.end_lineno]))


def function_chats(
    module: str, qual: str, node: ast.FunctionDef, lines: list[str], rng: random.Random
) -> Iterator[Chat]:
    """All the questions that one function answers."""
    doc = inspect.cleandoc(ast.get_docstring(node) or "")
    source = node_source(lines, node)
    name = f"{module}.{qual}"
    short = len(source) <= MAX_SOURCE and source.count("\n") >= 2
    if len(doc) >= 25 and (answer := shorten(doc)):
        question = rng.choice(WHAT).format(n=name)
        if short and rng.random() < 0.2:
            yield chat(question, answer, rng.choice(SHOW), fenced(source))
        else:
            yield chat(question, answer)
        if short and len(first_line(doc)) < 160:
            yield chat(
                f"Write a Python function `{signature(node)}` that {first_line(doc)}.",
                fenced(source),
            )
        elif rng.random() < 0.3:
            yield chat(rng.choice(ARGS).format(n=name), f"`{signature(node)}`")
    elif short and not doc and rng.random() < 0.35 and not node.name.startswith("__"):
        head, _, _ = source.partition("\n")
        yield chat(f"Complete this Python code:\n```python\n{head}\n```", fenced(source))


def code_chats(module: str, text: str, rng: random.Random) -> Iterator[Chat]:
    """Pairs from one Python module."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    doc = inspect.cleandoc(ast.get_docstring(tree) or "")
    if len(doc) >= 25 and (answer := shorten(doc)):
        yield chat(rng.choice(MODULE).format(n=module), answer)
    for qual, node in definitions(tree):
        if isinstance(node, ast.ClassDef):
            doc = inspect.cleandoc(ast.get_docstring(node) or "")
            if len(doc) >= 25 and (answer := shorten(doc)):
                yield chat(rng.choice(WHAT).format(n=f"{module}.{qual}"), answer)
        else:
            yield from function_chats(module, qual, node, lines, rng)


ROLE = re.compile(r":[\w:+.-]+:`[~!]?([^`<]+?)(?:\s*<[^`>]*>)?`")
DIRECTIVE = re.compile(
    r"^( *)\.\. (?:\w+:)?(function|class|method|exception|data|attribute|classmethod|"
    r"staticmethod|decorator):: (.+)$"
)
MODULE_LINE = re.compile(r"^\.\. (?:module|currentmodule):: (\S+)")


def plain(rst: str) -> str:
    """Strip reST roles and double back-quotes so that answers read as plain text."""
    text = ROLE.sub(r"`\1`", rst)
    text = text.replace("``", "`").replace("\\*", "*")
    return re.sub(r"(?m)^::$", "", text).strip()


def directive_body(lines: list[str], start: int, indent: int) -> str:
    """The indented prose under a directive, up to the first nested directive."""
    body: list[str] = []
    for line in lines[start:]:
        stripped = line.strip()
        if stripped and len(line) - len(line.lstrip()) <= indent:
            break
        if stripped.startswith(".. "):
            if body and any(body):
                break
            continue
        if stripped.startswith(":") and not any(body):
            continue
        body.append(line)
    return textwrap.dedent("\n".join(body)).strip()


def doc_chats(text: str, rng: random.Random) -> Iterator[Chat]:
    """Pairs from one reference page: each documented object answers a question."""
    lines = text.splitlines()
    module = ""
    for i, line in enumerate(lines):
        if found := MODULE_LINE.match(line):
            module = found.group(1)
        found = DIRECTIVE.match(line)
        if not found or not module:
            continue
        sig = found.group(3).strip().replace("\\", "")
        body = directive_body(lines, i + 1, len(found.group(1)))
        answer = shorten(plain(body), 600)
        name = sig.split("(")[0].strip()
        if len(answer) < 40 or not re.fullmatch(r"[\w.]+", name):
            continue
        qual = name if name.startswith(module) else f"{module}.{name}"
        yield chat(rng.choice(WHAT).format(n=qual), answer)
        if "(" in sig and rng.random() < 0.25:
            yield chat(rng.choice(ARGS).format(n=qual), f"`{sig}`")


def with_system(chats: list[Chat], rng: random.Random, share: float = 0.2) -> list[Chat]:
    """Give some chats a system turn, so that the model has seen one."""
    lead = {"role": "system", "content": SYSTEM_PROMPT}
    return [[lead, *c] if rng.random() < share else c for c in chats]


def render(messages: Chat, *, prompt: bool = False) -> str:
    """The chat template in Python; the Jinja template in the tokenizer config must agree."""
    text = "".join(f"<|{m['role']}|>\n{m['content'].strip()}<|end|>\n" for m in messages)
    return text + "<|assistant|>\n" if prompt else text


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
