"""A response as a sequence of content blocks: text, reasoning, tool calls.

Anthropic's Messages and OpenAI's Responses both stream blocks that are opened, extended and closed;
they differ only in the events that say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import msgspec

from ridgeline.serve.generation.collect import CollectedChoice
from ridgeline.serve.generation.stream import ChoiceUpdate
from ridgeline.serve.output_parsers.base import Content, OutputPart, ParsedToolCall, Reasoning
from ridgeline.serve.output_parsers.choice_parser import ChoiceParser
from ridgeline.serve.output_parsers.select import OutputFormat

BlockKind = Literal["text", "reasoning", "call"]


class ContentBlock(msgspec.Struct, kw_only=True):
    """A run of text of one kind, or one tool call. `is_complete`: not cut off by a limit."""

    index: int
    kind: BlockKind
    text: str = ""
    call: ParsedToolCall | None = None
    is_complete: bool = True


class BlockEvents(Protocol):
    """The events of one API for the life of a block."""

    def opened(self, block: ContentBlock) -> bytes: ...

    def extended(self, block: ContentBlock, text: str) -> bytes: ...

    def closed(self, block: ContentBlock) -> bytes: ...


class ContentBlocks:
    """Splits the first choice of a response into blocks."""

    def __init__(self, output_format: OutputFormat) -> None:
        self._parser = ChoiceParser(output_format)
        self.blocks: list[ContentBlock] = []
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def is_cut_off(self) -> bool:
        """Ended by a limit or an abort, and not by the model."""
        return self.finish_reason in ("length", "abort")

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    def add_choice(self, choice: CollectedChoice) -> list[ContentBlock]:
        """All blocks of a collected response."""
        for token in choice.tokens:
            for part in self._parser.feed(token.text):
                self._add(part)
            self._count_token()
        last_text = choice.finished.text if choice.finished else ""
        for part in [*self._parser.feed(last_text), *self._parser.finish()]:
            self._add(part)
        self._finish(choice.finish_reason, choice.stop_reason)
        return self.blocks

    def add_update(self, update: ChoiceUpdate, events: BlockEvents) -> bytes:
        """The events of one update of a stream."""
        parts = self._parser.feed(update.text)
        if update.finished is not None:
            parts = [*parts, *self._parser.finish()]
        data = b"".join(self._events_of(parts, events))
        if update.token is not None:
            self._count_token()
        if update.finished is not None:
            self._finish(update.finished.reason, update.finished.stop_reason)
            data += events.closed(self.blocks[-1]) if self.blocks else b""
        return data

    def _events_of(self, parts: Sequence[OutputPart], events: BlockEvents) -> Iterator[bytes]:
        for part in parts:
            before = self.blocks[-1] if self.blocks else None
            block = self._add(part)
            if block is not before:
                if before is not None:
                    yield events.closed(before)
                yield events.opened(block)
            text = part.arguments if isinstance(part, ParsedToolCall) else part.text
            yield events.extended(block, text)

    def _add(self, part: OutputPart) -> ContentBlock:
        """Append to the last block if it is of the same kind; every call is its own block."""
        kind, call = _kind(part), part if isinstance(part, ParsedToolCall) else None
        if not self.blocks or kind == "call" or self.blocks[-1].kind != kind:
            self.blocks.append(ContentBlock(index=len(self.blocks), kind=kind, call=call))
        block = self.blocks[-1]
        if not isinstance(part, ParsedToolCall):
            block.text += part.text
        return block

    def _count_token(self) -> None:
        is_reasoning = bool(self.blocks) and self.blocks[-1].kind == "reasoning"
        self.num_reasoning_tokens += is_reasoning

    def _finish(self, finish_reason: str | None, stop_reason: str | int | None) -> None:
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if self.is_cut_off and self.blocks:
            last = self.blocks[-1]
            last.is_complete = last.call is not None and _is_json(last.call.arguments)


def _is_json(arguments: str) -> bool:
    """False for a call that is the whole response, by its grammar, and was cut off."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def _kind(part: OutputPart) -> BlockKind:
    if isinstance(part, Content):
        return "text"
    return "reasoning" if isinstance(part, Reasoning) else "call"
