"""`/v1/responses`: OpenAI's Responses, text in and text out, whole or streamed. Nothing is kept."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serve.errors import ApiError, body
from ridgeline.serve.generation.collect import Tally
from ridgeline.serve.generation.content_blocks import Block, Blocks
from ridgeline.serve.generation.event_stream import Frames, encode
from ridgeline.serve.generation.respond import IGNORED_HEADER, answer, answer_headers
from ridgeline.serve.generation.stream import Job, Update
from ridgeline.serve.http.native_writer import Around
from ridgeline.serve.ids import fresh_id
from ridgeline.serve.openai.responses_schema import ResponsesRequest, as_chat, ignored_fields
from ridgeline.serve.openai.routes import chat_order
from ridgeline.serve.openai.schemas import parse
from ridgeline.serve.output_parsers.select import Dialect
from ridgeline.serve.service import Service


def _failed(error: ApiError) -> bytes:
    told: Any = body(error)["error"]
    payload = {"type": "error", "code": str(told["code"]), "message": told["message"]}
    return b"event: error\ndata: " + encode({**payload, "param": told["param"]}) + b"\n\n"


FRAMES = Frames(_failed, b"")


async def create(service: Service, request: Request) -> Response:
    """POST /v1/responses."""
    asked = parse(ResponsesRequest, await service.body(request))
    service.check_model(asked.model)
    order, dialect = await chat_order(service, request, "resp", as_chat(asked))
    job = order.job
    voice = ResponsesVoice(asked, job, service.name, dialect)
    ignored = answer_headers(order.headers["x-request-id"], ignored_fields(asked))
    headers = {name: v for name, v in order.headers.items() if name != IGNORED_HEADER} | ignored
    stream = bool(asked.stream)
    return await answer(
        request, job, service.group(job, stream=stream), voice, stream=stream, headers=headers
    )


class ResponsesVoice:
    """Renders one job as a response. See `ridgeline.serve.generation.respond.Voice`."""

    frames = FRAMES

    def __init__(self, asked: ResponsesRequest, job: Job, model: str, dialect: Dialect) -> None:
        self._asked, self._job, self._model = asked, job, model
        self._blocks, self._words = Blocks(dialect), _Words()
        self._created = int(time.time())

    def whole(self, tally: Tally) -> dict[str, Any]:
        self._blocks.whole(tally)
        return self._response(self._status(), tally)

    def opening(self, tally: Tally) -> list[bytes]:
        started = self._response("in_progress", None)
        kinds = ("response.created", "response.in_progress")
        return [self._words.event(kind, response=started) for kind in kinds]

    def news(self, update: Update, tally: Tally) -> list[bytes]:
        return self._blocks.news(update, self._words)

    def brief(self, choice: int, text: str) -> bytes | None:
        return None  # every piece of a block is counted and kept

    def around(self) -> Around | None:
        return None  # for the same reason

    def was_opened(self) -> None:
        raise AssertionError("no token goes another way")

    def closing(self, tally: Tally) -> list[bytes]:
        status = self._status()
        response = self._response(status, tally)
        return [self._words.event(f"response.{status}", response=response)]

    def _status(self) -> str:
        return "incomplete" if self._blocks.cut_off else "completed"

    def _why_cut_off(self) -> str:
        """OpenAI has no word for what was aborted; ours is that of the chat API."""
        return "max_output_tokens" if self._blocks.ending == "length" else "abort"

    def _response(self, status: str, tally: Tally | None) -> dict[str, Any]:
        asked, incomplete = self._asked, status == "incomplete"
        done = status != "in_progress"
        output = [self._words.item(block, _ended(block)) for block in self._blocks.blocks]
        choice: Any = asked.tool_choice or "auto"
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": self._why_cut_off()} if incomplete else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self._model,
            "output": output if done else [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
            "store": False,
            "temperature": self._job.sampling.temperature,
            "text": {"format": _format(asked)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [{"strict": None, **tool.model_dump()} for tool in asked.tools or ()],
            "top_p": self._job.sampling.top_p,
            "truncation": "disabled",
            "usage": None if tally is None else self._usage(tally),
            "metadata": asked.metadata or {},
        }

    def _usage(self, tally: Tally) -> dict[str, Any]:
        num_prompt = self._job.num_prompt_tokens
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": tally.cached_tokens},
            "output_tokens": tally.num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._blocks.num_reasoning_tokens},
            "total_tokens": num_prompt + tally.num_tokens,
        }


class _Words:
    """The life of a block in the words of Responses; every event has its number."""

    def __init__(self) -> None:
        self._sequence = 0
        self._ids: dict[int, str] = {}

    def event(self, kind: str, **more: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._sequence, **more}
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(payload) + b"\n\n"

    def opened(self, block: Block) -> list[bytes]:
        empty = Block(index=block.index, kind=block.kind, call=block.call)
        item = self.item(empty, "in_progress")
        if block.kind == "call":
            item["arguments"] = ""
        else:
            item["content"] = []
        told = [
            self.event("response.output_item.added", output_index=block.index, item=item),
        ]
        if block.kind != "call":
            told.append(self._at(block, "response.content_part.added", part=_part(empty)))
        return told

    def grew(self, block: Block, text: str) -> list[bytes]:
        extra: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        return [self._at(block, _KINDS[block.kind] + ".delta", delta=text, **extra)]

    def closed(self, block: Block) -> list[bytes]:
        kind, told = _KINDS[block.kind], list[bytes]()
        if block.call is not None:
            call = {"arguments": block.call.arguments, "name": block.call.name}
            told.append(self._at(block, f"{kind}.done", **call))
        else:
            extra: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            told.append(self._at(block, f"{kind}.done", text=block.text, **extra))
            told.append(self._at(block, "response.content_part.done", part=_part(block)))
        item = self.item(block, _ended(block))
        told.append(self.event("response.output_item.done", output_index=block.index, item=item))
        return told

    def item(self, block: Block, status: str) -> dict[str, Any]:
        """A block as an item of the output."""
        own = {"id": self._id(block), "status": status}
        if block.call is not None:
            call = {"name": block.call.name, "arguments": block.call.arguments}
            return {"type": "function_call", **own, "call_id": f"call_{own['id'][3:]}", **call}
        if block.kind == "reasoning":
            return {"type": "reasoning", **own, "summary": [], "content": [_part(block)]}
        return {"type": "message", **own, "role": "assistant", "content": [_part(block)]}

    def _at(self, block: Block, kind: str, **more: Any) -> bytes:
        where = {"item_id": self._id(block), "output_index": block.index}
        if block.kind != "call":
            where["content_index"] = 0
        return self.event(kind, **where, **more)

    def _id(self, block: Block) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        return self._ids.setdefault(block.index, fresh_id(f"{prefix}_"))


_KINDS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


def _ended(block: Block) -> str:
    """The status of an item that nothing is added to any more."""
    return "completed" if block.is_whole else "incomplete"


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _format(asked: ResponsesRequest) -> dict[str, Any]:
    wish = asked.text and asked.text.format
    return wish.model_dump(by_alias=True, exclude_none=True) if wish else {"type": "text"}
