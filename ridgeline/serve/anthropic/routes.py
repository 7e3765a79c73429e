"""`/v1/messages`: Anthropic's Messages over the same engine, whole, streamed, or only counted."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serve.anthropic.schemas import CountRequest, MessagesRequest, as_chat
from ridgeline.serve.errors import anthropic_body
from ridgeline.serve.generation.collect import Tally
from ridgeline.serve.generation.content_blocks import Block, Blocks
from ridgeline.serve.generation.event_stream import Frames, encode
from ridgeline.serve.generation.respond import answer
from ridgeline.serve.generation.stream import Job, Update
from ridgeline.serve.http.native_writer import Around
from ridgeline.serve.openai.chat_stream import call_id
from ridgeline.serve.openai.routes import chat_order
from ridgeline.serve.openai.sampling_params import chat_prompt
from ridgeline.serve.openai.schemas import parse
from ridgeline.serve.output_parsers.select import Dialect, dialect_of
from ridgeline.serve.service import Service, to_json


def event(payload: dict[str, Any]) -> bytes:
    """A named server-sent event: its name is its payload's type."""
    return b"event: " + str(payload["type"]).encode() + b"\ndata: " + encode(payload) + b"\n\n"


FRAMES = Frames(lambda error: event(anthropic_body(error)), b"")


async def create(service: Service, request: Request) -> Response:
    """POST /v1/messages."""
    asked = parse(MessagesRequest, await service.body(request))
    service.check_model(asked.model)
    order, dialect = await chat_order(service, request, "msg", as_chat(asked))
    job = order.job
    voice = MessagesVoice(job, service.name, dialect)
    headers = {**order.headers, "request-id": order.headers["x-request-id"]}
    stream = bool(asked.stream)
    return await answer(
        request, job, service.group(job, stream=stream), voice, stream=stream, headers=headers
    )


async def count(service: Service, request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    asked = parse(CountRequest, await service.body(request))
    service.check_model(asked.model)
    chat = as_chat(asked)
    dialect_of(chat, service.options, service.caps)  # what creating would refuse, this refuses
    prompt = await chat_prompt(chat, service.engine.tokenizer, service.caps)
    return to_json({"input_tokens": len(prompt.tokens)})


class MessagesVoice:
    """Renders one job as a message. See `ridgeline.serve.generation.respond.Voice`."""

    frames = FRAMES

    def __init__(self, job: Job, model: str, dialect: Dialect) -> None:
        self._job, self._model = job, model
        self._blocks, self._words = Blocks(dialect), _Words()

    def whole(self, tally: Tally) -> dict[str, Any]:
        blocks = self._blocks.whole(tally)
        content = [_content(block, self._words.id_of(block)) for block in blocks]
        return self._message(content, self._usage(tally)) | self._stop()

    def opening(self, tally: Tally) -> list[bytes]:
        message = self._message([], self._usage(tally))
        return [event({"type": "message_start", "message": message})]

    def news(self, update: Update, tally: Tally) -> list[bytes]:
        return self._blocks.news(update, self._words)

    def brief(self, choice: int, text: str) -> bytes | None:
        return None  # every piece of a block is counted and kept

    def around(self) -> Around | None:
        return None  # for the same reason

    def was_opened(self) -> None:
        raise AssertionError("no token goes another way")

    def closing(self, tally: Tally) -> list[bytes]:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage(tally)}
        return [event(delta), event({"type": "message_stop"})]

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _stop(self) -> dict[str, Any]:
        stop = self._blocks.stop_reason
        if self._blocks.ending == "length":
            reason = "max_tokens"
        elif self._blocks.ending == "abort":
            reason = "abort"
        elif self._blocks.num_calls:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if isinstance(stop, str) else "end_turn"
        sequence = stop if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, tally: Tally) -> dict[str, int]:
        """Anthropic counts the cached part of a prompt apart from the rest of it."""
        cached = tally.cached_tokens
        return {
            "input_tokens": self._job.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": tally.num_tokens,
        }


class _Words:
    """The life of a block in Anthropic's words."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}

    def id_of(self, block: Block) -> str:
        return self._ids.setdefault(block.index, call_id().replace("call_", "toolu_"))

    def opened(self, block: Block) -> list[bytes]:
        empty = _content(Block(index=block.index, kind=block.kind), self.id_of(block))
        if block.call is not None:
            empty |= {"name": block.call.name, "input": {}}
        return [
            event({"type": "content_block_start", "index": block.index, "content_block": empty})
        ]

    def grew(self, block: Block, text: str) -> list[bytes]:
        kind, field = _DELTAS[block.kind]
        delta = {"type": kind, field: text}
        return [event({"type": "content_block_delta", "index": block.index, "delta": delta})]

    def closed(self, block: Block) -> list[bytes]:
        return [event({"type": "content_block_stop", "index": block.index})]


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _content(block: Block, use_id: str) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    name, arguments = (block.call.name, block.call.arguments) if block.call else ("", "{}")
    return {"type": "tool_use", "id": use_id, "name": name, "input": _object(arguments)}


def _object(arguments: str) -> dict[str, Any]:
    """The arguments as a value; a call that was cut short by max_tokens has none."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
