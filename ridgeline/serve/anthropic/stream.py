"""`/v1/messages`: a response as content blocks, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.serve.anthropic.schemas import (
    MessageResponse,
    MessageUsage,
    ResponseBlock,
    StopReason,
)
from ridgeline.serve.errors import ApiError, anthropic_error_body
from ridgeline.serve.generation.collect import CollectedChoice
from ridgeline.serve.generation.content_blocks import BlockKind, ContentBlock, ContentBlocks
from ridgeline.serve.generation.event_stream import named_sse
from ridgeline.serve.generation.ids import derive_id
from ridgeline.serve.generation.stream import ChoiceUpdate, ResponseStream
from ridgeline.serve.output_parsers.select import OutputFormat


class MessageStream:
    """A `ResponseSerializer` of the Messages API."""

    def __init__(self, stream: ResponseStream, model: str, output_format: OutputFormat) -> None:
        self._stream, self._model = stream, model
        self._blocks = ContentBlocks(output_format)
        self._block_events = MessageBlockEvents(stream.request.id)

    def body(self, choices: Sequence[CollectedChoice]) -> MessageResponse:
        """The finished message."""
        blocks = self._blocks.add_choice(choices[0])
        message = self._message([self._block_events.block(block) for block in blocks])
        message["stop_reason"], message["stop_sequence"] = self._stop()
        return message

    def open(self) -> bytes:
        """The message without content.

        Its usage counts one output token, as Anthropic's API does, however many the first update
        has: a stream must not show how its tokens were batched. The closing event has the count.
        """
        message = self._message([])
        message["usage"]["output_tokens"] = 1
        return _event({"type": "message_start", "message": message})

    def events(self, update: ChoiceUpdate) -> bytes:
        """The events of its blocks."""
        return self._blocks.add_update(update, self._block_events)

    def close(self) -> bytes:
        """Why it stopped, and the usage."""
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        message_delta = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        return _event(message_delta) + _event({"type": "message_stop"})

    def error(self, error: ApiError) -> bytes:
        """The event that ends a broken stream."""
        return _event(anthropic_error_body(error))

    def _message(self, content: list[ResponseBlock]) -> MessageResponse:
        return {
            "id": self._stream.request.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _stop(self) -> tuple[StopReason, str | None]:
        """Stop reason, and the stop sequence if that was it."""
        blocks = self._blocks
        if blocks.finish_reason == "length":
            return "max_tokens", None
        if blocks.finish_reason == "abort":
            return "abort", None
        if blocks.num_calls:
            return "tool_use", None
        if isinstance(blocks.stop_reason, str):
            return "stop_sequence", blocks.stop_reason
        return "end_turn", None

    def _usage(self) -> MessageUsage:
        usage = self._stream.usage()
        created = max(0, self._stream.pinned_tokens - usage.cached_tokens)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


class MessageBlockEvents:
    """The life of a block in Anthropic's events."""

    _DELTAS: dict[BlockKind, tuple[str, str]] = {
        "text": ("text_delta", "text"),
        "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id

    def opened(self, block: ContentBlock) -> bytes:
        empty = self.block(ContentBlock(index=block.index, kind=block.kind))
        if block.call is not None and empty["type"] == "tool_use":
            empty["name"] = block.call.name
        return _event({"type": "content_block_start", "index": block.index, "content_block": empty})

    def extended(self, block: ContentBlock, text: str) -> bytes:
        kind, field = self._DELTAS[block.kind]
        delta = {"type": kind, field: text}
        return _event({"type": "content_block_delta", "index": block.index, "delta": delta})

    def closed(self, block: ContentBlock) -> bytes:
        return _event({"type": "content_block_stop", "index": block.index})

    def block(self, block: ContentBlock) -> ResponseBlock:
        """A block as part of a message."""
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        name, arguments = (block.call.name, block.call.arguments) if block.call else ("", "{}")
        call_id = derive_id("toolu_", self._response_id, str(block.index), 24)
        return {"type": "tool_use", "id": call_id, "name": name, "input": _parse(arguments)}


def _event(payload: Mapping[str, Any]) -> bytes:
    """An event is named as the type of its payload."""
    return named_sse(str(payload["type"]), payload)


def _parse(arguments: str) -> dict[str, Any]:
    """The arguments as a value; empty for a call that max_tokens cut off."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
