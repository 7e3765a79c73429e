"""A streamed answer as a row of blocks, each opened, filled and closed: text, reasoning, call.

Anthropic's Messages and OpenAI's Responses both tell a stream this way; they differ in words only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal, Protocol

import msgspec

from ridgeline.serve.generation.collect import Tally
from ridgeline.serve.generation.stream import Update
from ridgeline.serve.openai.chat_stream import Listener
from ridgeline.serve.output_parsers.base import Call, Content, Part, Reasoning
from ridgeline.serve.output_parsers.select import Dialect

Kind = Literal["text", "reasoning"]


class Block(msgspec.Struct, kw_only=True):
    """One stretch of text of a kind, or one call. `is_whole`: it was not cut off."""

    index: int
    kind: Kind | Literal["call"]
    text: str = ""
    call: Call | None = None
    is_whole: bool = True


class BlockWords(Protocol):
    """How an endpoint words the life of a block."""

    def opened(self, block: Block) -> list[bytes]: ...

    def grew(self, block: Block, text: str) -> list[bytes]: ...

    def closed(self, block: Block) -> list[bytes]: ...


class Blocks:
    """The first choice's parts as blocks."""

    def __init__(self, dialect: Dialect) -> None:
        self._listener = Listener(dialect)
        self.blocks: list[Block] = []
        self.num_reasoning_tokens = 0
        self.ending: str | None = None
        self.stop_reason: str | int | None = None

    def whole(self, tally: Tally) -> list[Block]:
        """All blocks of an answer that is not streamed."""
        choice = tally.choices[0]
        end = choice.finished
        for token in choice.tokens:
            self._hear(token.text)
            self._count()
        self._hear(end.text if end else "", ended=True)
        self._end(end.reason if end else None, end.stop_reason if end else None)
        return self.blocks

    def news(self, update: Update, words: BlockWords) -> list[bytes]:
        """What one update says."""
        told: list[bytes] = []
        ended = update.finished is not None
        for part in self._listener.hear(update.text, ended=ended):
            told += self._tell(part, words)
        if update.token is not None:
            self._count()
        if update.finished is not None:
            self._end(update.finished.reason, update.finished.stop_reason)
            told += self._close(words)
        return told

    @property
    def cut_off(self) -> bool:
        """Ended by a limit, or by somebody (`POST /admin/abort`), not by the model."""
        return self.ending in ("length", "abort")

    @property
    def num_calls(self) -> int:
        return self._listener.num_calls

    def _hear(self, text: str, *, ended: bool = False) -> None:
        for part in self._listener.hear(text, ended=ended):
            self._add(part)

    def _count(self) -> None:
        """One token came: it is reasoning's while the last block is."""
        self.num_reasoning_tokens += bool(self.blocks) and self.blocks[-1].kind == "reasoning"

    def _end(self, reason: str | None, stop_reason: str | int | None) -> None:
        self.ending, self.stop_reason = reason, stop_reason
        if self.cut_off and self.blocks:
            last = self.blocks[-1]
            last.is_whole = last.call is not None and _is_whole(last.call)

    def _tell(self, part: Part, words: BlockWords) -> Iterator[bytes]:
        before = len(self.blocks)
        fits = bool(self.blocks) and _fits(part, self.blocks[-1])
        if not fits and self.blocks:
            yield from self._close(words)
        block = self._add(part)
        if len(self.blocks) > before:
            yield from words.opened(block)
        text = part.arguments if isinstance(part, Call) else part.text
        yield from words.grew(block, text)

    def _close(self, words: BlockWords) -> list[bytes]:
        return words.closed(self.blocks[-1]) if self.blocks else []

    def _add(self, part: Part) -> Block:
        if not self.blocks or not _fits(part, self.blocks[-1]):
            call = part if isinstance(part, Call) else None
            self.blocks.append(Block(index=len(self.blocks), kind=_kind(part), call=call))
        block = self.blocks[-1]
        if not isinstance(part, Call):
            block.text += part.text
        return block


def _is_whole(call: Call) -> bool:
    """One that was found in a text is; one that is the answer, by its grammar, may be cut off."""
    try:
        json.loads(call.arguments)
    except (ValueError, RecursionError):
        return False
    return True


def _kind(part: Part) -> Kind | Literal["call"]:
    if isinstance(part, Content):
        return "text"
    return "reasoning" if isinstance(part, Reasoning) else "call"


def _fits(part: Part, block: Block) -> bool:
    """Text continues text of its kind; every call is a block of its own."""
    return block.kind != "call" and block.kind == _kind(part)
