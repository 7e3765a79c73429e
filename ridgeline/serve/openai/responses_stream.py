"""`/v1/responses`: OpenAI's Responses API, text in and text out. Nothing is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.serve.errors import ApiError, error_body
from ridgeline.serve.generation.collect import CollectedChoice
from ridgeline.serve.generation.content_blocks import BlockKind, ContentBlock, ContentBlocks
from ridgeline.serve.generation.event_stream import named_sse
from ridgeline.serve.generation.ids import derive_id
from ridgeline.serve.generation.stream import ChoiceUpdate, ResponseStream
from ridgeline.serve.openai.objects import (
    ResponseItem,
    ResponseObject,
    ResponseTextPart,
    response_usage,
)
from ridgeline.serve.openai.responses_schemas import ResponsesRequest
from ridgeline.serve.output_parsers.select import OutputFormat


class ResponsesStream:
    """A `ResponseSerializer` of the Responses API."""

    def __init__(
        self,
        body: ResponsesRequest,
        stream: ResponseStream,
        model: str,
        output_format: OutputFormat,
    ) -> None:
        self._body, self._stream, self._model = body, stream, model
        self._blocks = ContentBlocks(output_format)
        self._block_events = ResponseBlockEvents(stream.request.id)
        self._created = stream.request.created

    def body(self, choices: Sequence[CollectedChoice]) -> ResponseObject:
        """The finished response."""
        self._blocks.add_choice(choices[0])
        return self._response(is_finished=True)

    def open(self) -> bytes:
        """The response as it starts, in two events."""
        response = self._response(is_finished=False)
        names = ("response.created", "response.in_progress")
        return b"".join([self._block_events.event(name, response=response) for name in names])

    def events(self, update: ChoiceUpdate) -> bytes:
        """The events of its blocks."""
        return self._blocks.add_update(update, self._block_events)

    def close(self) -> bytes:
        """The response as it ends."""
        response = self._response(is_finished=True)
        return self._block_events.event(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> bytes:
        """The event that ends a broken stream."""
        detail = error_body(error)["error"]
        payload = {
            "type": "error",
            "code": str(detail["code"]),
            "message": detail["message"],
            "param": detail["param"],
        }
        return named_sse("error", payload)

    def _response(self, *, is_finished: bool) -> ResponseObject:
        body, blocks, sampling = self._body, self._blocks, self._stream.request.sampling
        is_incomplete = is_finished and blocks.is_cut_off
        choice, text_format = body.tool_choice or "auto", body.text and body.text.format
        return {
            "id": self._stream.request.id,
            "object": "response",
            "created_at": self._created,
            "status": "incomplete"
            if is_incomplete
            else "completed"
            if is_finished
            else "in_progress",
            "error": None,
            "incomplete_details": (
                # OpenAI has no reason for an aborted response; this is the chat API's
                {"reason": "max_output_tokens" if blocks.finish_reason == "length" else "abort"}
                if is_incomplete
                else None
            ),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": (
                [self._block_events.item(block, _end_status(block)) for block in blocks.blocks]
                if is_finished
                else []
            ),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {
                "format": text_format.model_dump(by_alias=True, exclude_none=True)
                if text_format
                else {"type": "text"}
            },
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [{"strict": None, **tool.model_dump()} for tool in body.tools or ()],
            "top_p": sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": (
                response_usage(self._stream.usage(), blocks.num_reasoning_tokens)
                if is_finished
                else None
            ),
            "metadata": body.metadata or {},
        }


class ResponseBlockEvents:
    """The life of a block in events of the Responses API, numbered in sequence."""

    _EVENT_PREFIX: dict[BlockKind, str] = {
        "text": "response.output_text",
        "reasoning": "response.reasoning_text",
        "call": "response.function_call_arguments",
    }
    _ID_PREFIX: dict[BlockKind, str] = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id
        self._sequence_number = 0

    def event(self, event_type: str, **fields: Any) -> bytes:
        payload = {"type": event_type, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return named_sse(event_type, payload)

    def opened(self, block: ContentBlock) -> bytes:
        empty = ContentBlock(index=block.index, kind=block.kind, call=block.call)
        item = self.item(empty, "in_progress")
        if block.kind == "call":
            item["arguments"] = ""
        else:
            item["content"] = []
        data = self.event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            data += self._block_event(block, "response.content_part.added", part=_part(empty))
        return data

    def extended(self, block: ContentBlock, text: str) -> bytes:
        extra: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        name = f"{self._EVENT_PREFIX[block.kind]}.delta"
        return self._block_event(block, name, delta=text, **extra)

    def closed(self, block: ContentBlock) -> bytes:
        name = f"{self._EVENT_PREFIX[block.kind]}.done"
        if block.call is not None:
            call = {"arguments": block.call.arguments, "name": block.call.name}
            data = self._block_event(block, name, **call)
        else:
            extra: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            data = self._block_event(block, name, text=block.text, **extra)
            data += self._block_event(block, "response.content_part.done", part=_part(block))
        item = self.item(block, _end_status(block))
        return data + self.event("response.output_item.done", output_index=block.index, item=item)

    def item(self, block: ContentBlock, status: Any) -> ResponseItem:
        """A block as an item of the output."""
        item_id = self._id(block)
        if block.call is not None:
            return {
                "type": "function_call",
                "id": item_id,
                "status": status,
                "call_id": f"call_{item_id[3:]}",
                "name": block.call.name,
                "arguments": block.call.arguments,
            }
        item: ResponseItem = {
            "type": "reasoning" if block.kind == "reasoning" else "message",
            "id": item_id,
            "status": status,
            "content": [_part(block)],
        }
        if block.kind == "reasoning":
            item["summary"] = []
        else:
            item["role"] = "assistant"
        return item

    def _block_event(self, block: ContentBlock, event_type: str, **fields: Any) -> bytes:
        place: dict[str, Any] = {"item_id": self._id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        return self.event(event_type, **place, **fields)

    def _id(self, block: ContentBlock) -> str:
        return derive_id(self._ID_PREFIX[block.kind], self._response_id, str(block.index))


def _end_status(block: ContentBlock) -> str:
    return "completed" if block.is_complete else "incomplete"


def _part(block: ContentBlock) -> ResponseTextPart:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
