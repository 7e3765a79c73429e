"""What no file contains: code that loads code, and traces of the machine it grew on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.code import ROOT, files, has_docstring, imports, name_of, source, tracked

FOLDERS = ("ridgeline", "scripts", "benchmarks")
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {"torch.load", "torch.hub.load", "os.system", "os.popen"}
KEYWORDS = {"trust_remote_code", "allow_pickle", "shell"}

# put together here so that this file does not accuse itself
_PLACES = ("/" + "work/", "/" + "root/", "/" + r"home/\w", "/" + r"Users/\w", "/" + r"tmp/bash")
ASSETS = ROOT / "ridgeline" / "assets"  # texts of others, who write of their own machines
MACHINE_PATH = re.compile("|".join(rf"(?<![\w/.-]){place}" for place in _PLACES))
CONFLICT = ("<<<<<<< ", ">>>>>>> ")
TEXT = {".py", ".md", ".toml", ".txt", ".cpp", ".h", ".json", ".yml", ".yaml", ".sh", ".html", ""}


def offences(path: Path) -> Iterator[str]:
    where = name_of(path)
    for module, line in imports(path):
        if module.partition(".")[0] in MODULES:
            yield f"{where}:{line}: imports {module}"
    for call in source(path).calls:
        yield from (f"{where}:{call.lineno}: {what}" for what in _bad_call(call))


def _bad_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    if name in BUILTINS or name in CALLS:
        yield f"calls {name}"
    for keyword in call.keywords:
        value = keyword.value
        is_false = isinstance(value, ast.Constant) and value.value is False
        if keyword.arg in KEYWORDS and not is_false:
            yield f"passes {keyword.arg}={ast.unparse(value)}"


def opens_addresses(tree: ast.AST) -> list[int]:
    """Lines that call `urlopen`, which raises more than OSError."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [(ast.unparse(call.func).rpartition(".")[2], call.lineno) for call in calls]
    return [line for name, line in names if name == "urlopen"]


def test_an_address_that_is_opened_is_seen() -> None:
    assert opens_addresses(ast.parse("x = urllib.request.urlopen(url)\nurlopen(url)")) == [1, 2]


def test_addresses_are_opened_in_one_place() -> None:
    found = [
        f"{name_of(path)}:{line}: use open_reply of ridgeline.http_replies"
        for path in files("ridgeline")
        if name_of(path) != "ridgeline/http_replies.py"
        for line in opens_addresses(source(path).tree)
    ]
    assert not found, "\n".join(found)


def test_nothing_forbidden() -> None:
    found = [offence for path in files(*FOLDERS) for offence in offences(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import x",
        "eval('1')",
        "torch.load(p)",
        "f(trust_remote_code=True)",
    ],
)
def test_an_offence_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr("tests.house.code.ROOT", tmp_path)
    bad = tmp_path / "bad.py"
    bad.write_text(source)
    assert len(list(offences(bad))) == 1


def test_every_module_says_what_it_is() -> None:
    silent = [
        name_of(path)
        for path in files("ridgeline", "scripts", "tests")
        if path.stat().st_size and not has_docstring(path)
    ]
    assert not silent, "\n".join(silent)


def test_no_machine_paths_and_no_conflict_markers() -> None:
    found = []
    for path in tracked():
        if path.suffix not in TEXT or ASSETS in path.parents:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line) or line.startswith(CONFLICT):
                found.append(f"{name_of(path)}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


DECODERS = {
    "json.loads", "json.load", "tomllib.loads", "tomllib.load", "msgspec.json.decode",
    "msgspec.msgpack.decode", "msgspec.toml.decode", "yaml.safe_load", "from_json",
}  # fmt: skip
TOO_LITTLE = re.compile(r"\b(\w*ValueError|MsgspecError|\w*DecodeError|YAMLError)\b")
ENOUGH = re.compile(r"\b(DECODE_ERRORS|RecursionError|Exception|BaseException)\b")


def decoders_with_half_a_net(tree: ast.AST) -> Iterator[int]:
    """Lines of `try` that catch what decoders raise for malformed data, but not what they raise for
    values that are nested too deeply."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            inside = [call for part in node.body for call in ast.walk(part)]
            names = {ast.unparse(call.func) for call in inside if isinstance(call, ast.Call)}
            caught = " ".join(ast.unparse(h.type) for h in node.handlers if h.type is not None)
            if names & DECODERS and TOO_LITTLE.search(caught) and not ENOUGH.search(caught):
                yield node.lineno


OUTSIDE = re.compile(r"\b(read_text|read_bytes|read|open|open_reply|urlopen|run)\(|\breply\b")
SHIPPED = re.compile(r"\b(importlib\.resources|files)\(")
NETS = re.compile(r"\b(file_of_interrupted_run|open_tensors)\(")
OWN_PARENT = {"ridgeline/engine/tokenization/template_process/renderer.py"}  # it writes sound JSON


class _DecodersWithoutNet(ast.NodeVisitor):
    """Lines that decode what a file, a command or a server has, where no `try` of the function
    catches what decoders raise. Files of the package itself are known to be sound."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self._has_net = False
        self._outside: set[str] = set()  # variables of the function

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if SHIPPED.search(ast.unparse(node)):
            return
        before = self._has_net, self._outside
        self._has_net, self._outside = False, set()
        self.generic_visit(node)
        self._has_net, self._outside = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Try(self, node: ast.Try) -> None:
        caught = " ".join(ast.unparse(h.type) for h in node.handlers if h.type is not None)
        self._visit_within(node.body, has_net=ENOUGH.search(caught) is not None)
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self._note(item.optional_vars, item.context_expr)
        opened = " ".join(ast.unparse(item.context_expr) for item in node.items)
        self._visit_within(node.body, has_net=NETS.search(opened) is not None)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._note(target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._note(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._note(node.target, node.iter)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        is_decoder = ast.unparse(node.func) in DECODERS
        if is_decoder and not self._has_net and any(map(self._is_outside, node.args)):
            self.lines.append(node.lineno)
        self.generic_visit(node)

    def _visit_within(self, body: list[ast.stmt], *, has_net: bool) -> None:
        before, self._has_net = self._has_net, self._has_net or has_net
        for statement in body:
            self.visit(statement)
        self._has_net = before

    def _note(self, target: ast.AST | None, value: ast.AST) -> None:
        if target is not None and self._is_outside(value):
            names = (part for part in ast.walk(target) if isinstance(part, ast.Name))
            self._outside |= {name.id for name in names}

    def _is_outside(self, value: ast.AST) -> bool:
        names = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
        return OUTSIDE.search(ast.unparse(value)) is not None or bool(names & self._outside)


def decoders_without_net(tree: ast.AST) -> list[int]:
    visitor = _DecodersWithoutNet()
    visitor.visit(tree)
    return visitor.lines


@pytest.mark.parametrize(
    "body",
    [
        "return json.loads(path.read_text())",
        "return json.loads(file.read_text()) if file.is_file() else None",
        "with open_reply(url, 5) as reply:\n        return json.load(reply)['data'][0]",
        "text = run(words)\n    return json.loads(text)",
        "for line in file.read_text().splitlines():\n        json.loads(line)",
        "try:\n        return json.load(path.open())\n    except OSError:\n        return None",
    ],
)
def test_a_decoder_without_net_is_seen(body: str) -> None:
    assert len(decoders_without_net(ast.parse(f"def read(path):\n    {body}"))) == 1


def test_decoders_of_files_commands_and_servers_have_a_net() -> None:
    found = [
        f"{name_of(path)}:{line}: catch DECODE_ERRORS of ridgeline.errors, and name the file"
        for path in files("ridgeline")
        if name_of(path) not in OWN_PARENT
        for line in decoders_without_net(source(path).tree)
    ]
    assert not found, "\n".join(found)


def test_decoders_are_caught_with_all_that_they_raise() -> None:
    found = [
        f"{name_of(path)}:{line}: catch DECODE_ERRORS of ridgeline.errors"
        for path in files("ridgeline")
        for line in decoders_with_half_a_net(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)
