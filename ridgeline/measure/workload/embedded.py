"""Workloads that ship with Ridgeline: `chat`, `code`, and `chat-and-code`, half of each.

The demo model has not seen the texts in training (ridgeline/assets/heldout, PSF-2.0).

    chat   one system prompt shared by all · 0 to 2 earlier turns · a question   → 32..128 tokens
    code   one of 8 file headers, drawn by Zipf's law · the start of a function   → 16..64 tokens

Prompts have about 50 to 700 tokens under a 4k byte-level BPE. Both kinds share prefixes as real
traffic does. Every body contains a new tag, so that a prefix cache can reuse the shared part of a
prompt but never a whole prompt of an earlier run: rounds of a comparison with different seeds stay
independent.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files

import msgspec

from ridgeline.errors import BadInput
from ridgeline.measure.workload.base import ChatPrompt, LoadRequest, PromptMessage

SYSTEM = (
    "You are a careful assistant for Python developers. Answer from the standard library and its "
    "documentation. Prefer a short working example to a long explanation, name the module that "
    "each function comes from, and say so plainly when something does not exist or has been "
    "removed. Keep to the style of the language: four spaces, clear names, no clever tricks. When "
    "a question is ambiguous, state the reading you chose in one sentence before you answer."
)
EARLIER_TURNS = (0, 0, 0, 1, 1, 2)  # drawn from uniformly
MAX_ANSWER_CHARS = 500
CHAT_OUTPUT = (32, 128)
CODE_OUTPUT = (16, 64)
NUM_HEADERS = 8
HEADER_CHARS = (500, 1700)
HEAD_CHARS = (60, 420)

_Pair = tuple[str, str]  # question, answer


class ChatLoad(msgspec.Struct, frozen=True):
    """Conversations over one shared system prompt."""

    pairs: tuple[_Pair, ...]
    name: str = "chat"

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        rng = random.Random(f"{seed}/chat")
        for index in range(n):
            yield LoadRequest(
                id=f"chat-{seed}-{index}",
                kind="chat",
                prompt=ChatPrompt(self._turns(rng)),
                max_tokens=rng.randint(*CHAT_OUTPUT),
            )

    def _turns(self, rng: random.Random) -> tuple[PromptMessage, ...]:
        turns = [PromptMessage("system", SYSTEM)]
        *earlier, last = rng.sample(self.pairs, rng.choice(EARLIER_TURNS) + 1)
        for question, answer in earlier:
            turns += [
                PromptMessage("user", question),
                PromptMessage("assistant", answer[:MAX_ANSWER_CHARS]),
            ]
        turns.append(PromptMessage("user", last[0]))
        tag = PromptMessage("user", f"Ticket {_tag(rng)}. {turns[1].content}")
        return (turns[0], tag, *turns[2:])


class CodeLoad(msgspec.Struct, frozen=True):
    """Completions of the start of a function, preceded by the header of its file."""

    headers: tuple[str, ...]
    heads: tuple[str, ...]
    name: str = "code"

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        rng = random.Random(f"{seed}/code")
        zipf = [1 / rank for rank in range(1, len(self.headers) + 1)]
        for index in range(n):
            header = rng.choices(self.headers, zipf)[0]
            head = _truncate(rng.choice(self.heads), rng.randint(*HEAD_CHARS))
            yield LoadRequest(
                id=f"code-{seed}-{index}",
                kind="code",
                prompt=f"{header}\n\n# edit {_tag(rng)}\n{head}",
                max_tokens=rng.randint(*CODE_OUTPUT),
            )


class MixedLoad(msgspec.Struct, frozen=True):
    """Each request comes from one of the parts, drawn with equal probability."""

    parts: tuple[ChatLoad | CodeLoad, ...]
    name: str = "chat-and-code"

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        rng = random.Random(f"{seed}/mix")
        streams = [part.sample(n, seed) for part in self.parts]
        for _ in range(n):
            yield next(rng.choice(streams))


def chat(options: str = "") -> ChatLoad:
    _no_options("chat", options)
    rows = (msgspec.json.decode(line) for line in _asset("chat.jsonl").split("\n") if line)
    return ChatLoad(tuple(_first_pair(row["messages"]) for row in rows))


def code(options: str = "") -> CodeLoad:
    _no_options("code", options)
    text = _asset("code.txt")
    headers = _headers(text)
    heads = tuple(
        part for part in re.split(r"(?m)^(?=(?:    )?def )", text) if part.lstrip()[:4] == "def "
    )
    return CodeLoad(headers, tuple(head for head in heads if len(head) > HEAD_CHARS[0]))


def chat_and_code(options: str = "") -> MixedLoad:
    _no_options("chat-and-code", options)
    return MixedLoad((chat(), code()))


def _no_options(name: str, options: str) -> None:
    if options:
        raise BadInput(f"the workload {name} has no options", value=options, fix=f"write {name}")


def _asset(name: str) -> str:
    try:
        return (files("ridgeline") / "assets" / "heldout" / name).read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(
            "the embedded text is missing", value=name, fix=f"reinstall ({error})"
        ) from None


def _first_pair(messages: Sequence[dict[str, str]]) -> _Pair:
    """The first question and answer: a follow-up question makes no sense without them."""
    question, answer = [m["content"] for m in messages if m["role"] != "system"][:2]
    return question, answer


def _headers(text: str) -> tuple[str, ...]:
    """Sections of code at equal distances, with shuffled lengths spread over HEADER_CHARS."""
    starts = [len(text) * i // NUM_HEADERS for i in range(NUM_HEADERS)]
    low, high = HEADER_CHARS
    lengths = [low + (high - low) * i // (NUM_HEADERS - 1) for i in range(NUM_HEADERS)]
    random.Random("headers").shuffle(lengths)
    return tuple(
        _truncate(text[text.find("\n", start) + 1 :] if start else text, length)
        for start, length in zip(starts, lengths, strict=True)
    )


def _truncate(text: str, num_chars: int) -> str:
    """At most `num_chars` of a text, ending with a complete line if there is one."""
    piece = text[:num_chars]
    whole, newline, _ = piece.rpartition("\n")
    return whole if newline and len(text) > num_chars else piece


def _tag(rng: random.Random) -> str:
    return f"{rng.getrandbits(32):08x}"
