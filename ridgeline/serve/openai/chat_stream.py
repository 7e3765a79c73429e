"""`/v1/chat/completions`: choices as messages, and as deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from ridgeline.records import Token
from ridgeline.serve.engine_protocol import ServedTokenizer
from ridgeline.serve.generation.collect import CollectedChoice
from ridgeline.serve.generation.ids import derive_id
from ridgeline.serve.generation.stream import ChoiceUpdate, ResponseStream
from ridgeline.serve.openai.logprobs import (
    TokenDecoder,
    TokenIdDecoder,
    chat_logprobs,
    prompt_logprobs,
)
from ridgeline.serve.openai.objects import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ResponseMessage,
    ToolCallObject,
)
from ridgeline.serve.openai.schemas import ChatCompletionRequest
from ridgeline.serve.openai.stream import OpenAIStream
from ridgeline.serve.output_parsers.base import Content, OutputPart, ParsedToolCall, Reasoning
from ridgeline.serve.output_parsers.choice_parser import ChoiceParser
from ridgeline.serve.output_parsers.select import OutputFormat


class ChatCompletionStream(OpenAIStream):
    """The first chunk of every choice carries the role, and no text."""

    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        body: ChatCompletionRequest,
        stream: ResponseStream,
        model: str,
        tokenizer: ServedTokenizer,
        output_format: OutputFormat,
        *,
        include_timings: bool = False,
    ) -> None:
        super().__init__(body, stream, model, include_timings=include_timings)
        self._body = body
        self._decoder: TokenDecoder = (
            TokenIdDecoder(tokenizer) if body.return_tokens_as_token_ids else tokenizer
        )
        self._parsers = [ChoiceParser(output_format) for _ in range(stream.request.sampling.n)]
        self._opened: set[int] = set()

    def chunk_choices(self, update: ChoiceUpdate) -> Sequence[Mapping[str, Any]]:
        """The role, if the choice is new, and the delta of this update."""
        entries: list[ChatChunkChoice] = []
        if update.choice not in self._opened:
            self._opened.add(update.choice)
            role: ChatDelta = {"role": "assistant", "content": ""}
            entries.append(
                {"index": update.choice, "delta": role, "logprobs": None, "finish_reason": None}
            )
        parser, finished = self._parsers[update.choice], update.finished
        num_earlier_calls = parser.num_calls
        parts = parser.feed(update.text)
        if finished is not None:
            parts = [*parts, *parser.finish()]
        delta = _delta(parts, self._call_ids(update.choice, num_earlier_calls))
        if update.token and not delta:
            delta = {"content": ""}  # clients count tokens, even those without text
        entry: ChatChunkChoice = {
            "index": update.choice,
            "delta": delta,
            "logprobs": self._logprobs([update.token]) if update.token else None,
            "finish_reason": parser.finish_reason(finished.reason if finished else None),
            "stop_reason": finished.stop_reason if finished else None,
        }
        if self._body.return_token_ids:
            entry["token_ids"] = [update.token.token] if update.token else []
        return [*entries, *_with_separate_end(entry)]

    def response_choices(self, choices: Sequence[CollectedChoice]) -> Sequence[Mapping[str, Any]]:
        """One message per choice."""
        return [self._response_choice(index, choice) for index, choice in enumerate(choices)]

    def extra_fields(self, choices: Sequence[CollectedChoice]) -> Mapping[str, Any]:
        """What a chat response carries next to its choices, if requested."""
        fields = self._prompt_token_ids()
        if self._body.prompt_logprobs is None:
            return fields
        positions = next((c.prompt_logprobs for c in choices if c.prompt_logprobs), ())
        return {**fields, "prompt_logprobs": prompt_logprobs(positions, self._decoder)}

    def chunk_fields(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """The prompt's token ids come with the chunk that opens a choice."""
        return self._prompt_token_ids() if "role" in entry["delta"] else {}

    def _prompt_token_ids(self) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": [*self._stream.request.prompts[0].tokens]}

    def _response_choice(self, index: int, choice: CollectedChoice) -> ChatChoice:
        parser = self._parsers[index]
        parts = [*parser.feed(choice.text), *parser.finish()]
        entry: ChatChoice = {
            "index": index,
            "message": _message(parts, self._call_ids(index, 0)),
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": parser.finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            entry["token_ids"] = [event.token for event in choice.tokens]
        return entry

    def _call_ids(self, choice: int, first: int) -> Iterator[tuple[int, str]]:
        """Numbers and ids of the calls of a choice, from call `first` on."""
        response_id = self._stream.request.id
        for number in count(first):
            yield number, derive_id("call_", response_id, f"{choice}/{number}", 24)

    def _logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs([token.logprobs for token in tokens if token.logprobs], self._decoder)


def _with_separate_end(entry: ChatChunkChoice) -> list[ChatChunkChoice]:
    """The entry; if it holds calls and the end, in two: clients take a call as complete when a
    chunk without it follows."""
    if entry["finish_reason"] is None or "tool_calls" not in entry["delta"]:
        return [entry]
    end: ChatChunkChoice = {**entry, "delta": {}, "logprobs": None}
    if "token_ids" in end:
        end["token_ids"] = []
    return [{**entry, "finish_reason": None, "stop_reason": None}, end]


def join_text(parts: Sequence[OutputPart], kind: type[Content] | type[Reasoning]) -> str:
    """All text of one kind."""
    return "".join([part.text for part in parts if isinstance(part, kind)])


def _delta(parts: Sequence[OutputPart], call_ids: Iterator[tuple[int, str]]) -> ChatDelta:
    delta: ChatDelta = {}
    if reasoning := join_text(parts, Reasoning):
        delta["reasoning_content"] = reasoning
    if content := join_text(parts, Content):
        delta["content"] = content
    calls = [part for part in parts if isinstance(part, ParsedToolCall)]
    if calls:
        delta["tool_calls"] = [
            {"index": number, **_call(call, call_id)}
            for call, (number, call_id) in zip(calls, call_ids, strict=False)
        ]
    return delta


def _message(parts: Sequence[OutputPart], call_ids: Iterator[tuple[int, str]]) -> ResponseMessage:
    parsed = [part for part in parts if isinstance(part, ParsedToolCall)]
    calls = [_call(call, call_id) for call, (_, call_id) in zip(parsed, call_ids, strict=False)]
    content, reasoning = join_text(parts, Content), join_text(parts, Reasoning)
    message: ResponseMessage = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = content or None
        message["tool_calls"] = calls
    return message


def _call(call: ParsedToolCall, call_id: str) -> ToolCallObject:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
