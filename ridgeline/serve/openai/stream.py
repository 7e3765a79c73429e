"""What the streams of completions and of chat completions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.serve.errors import ApiError, error_body
from ridgeline.serve.generation.collect import CollectedChoice
from ridgeline.serve.generation.event_stream import sse
from ridgeline.serve.generation.stream import ChoiceUpdate, ResponseStream
from ridgeline.serve.openai.objects import completion_usage
from ridgeline.serve.openai.schemas import CompletionRequestBase

DONE = b"data: [DONE]\n\n"


class OpenAIStream(ABC):
    """A `ResponseSerializer`: chunks of choices in OpenAI's envelope.

    `include_timings`: send `metrics` with the usage.
    """

    response_object: str
    chunk_object: str

    def __init__(
        self,
        body: CompletionRequestBase,
        stream: ResponseStream,
        model: str,
        *,
        include_timings: bool,
    ) -> None:
        options = body.stream_options
        self._stream, self._include_timings = stream, include_timings
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_in_chunks = bool(options and options.continuous_usage_stats)
        self._id, self._created, self._model = stream.request.id, stream.request.created, model

    def body(self, choices: Sequence[CollectedChoice]) -> Mapping[str, Any]:
        """The JSON body of a response that is not streamed."""
        response = self._envelope(self.response_object, self.response_choices(choices))
        return {**response, **self._usage(), **self.extra_fields(choices)}

    def open(self) -> bytes:
        """Nothing: every choice opens with its own first chunk."""
        return b""

    def events(self, update: ChoiceUpdate) -> bytes:
        """The chunks of one update."""
        return b"".join([self._chunk(entry, update) for entry in self.chunk_choices(update)])

    def close(self) -> bytes:
        """The usage, if requested, and the end."""
        if not self._usage_at_end:
            return DONE
        return sse({**self._envelope(self.chunk_object, []), **self._usage()}) + DONE

    def error(self, error: ApiError) -> bytes:
        """The error as an event, and the end."""
        return sse(error_body(error)) + DONE

    @abstractmethod
    def chunk_choices(self, update: ChoiceUpdate) -> Sequence[Mapping[str, Any]]:
        """One `choices` entry per chunk to send."""

    @abstractmethod
    def response_choices(self, choices: Sequence[CollectedChoice]) -> Sequence[Mapping[str, Any]]:
        """The `choices` of a response that is not streamed."""

    def extra_fields(self, choices: Sequence[CollectedChoice]) -> Mapping[str, Any]:
        """Further fields of a response that is not streamed."""
        return {}

    def chunk_fields(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """Further fields of the chunk of a choice."""
        return {}

    def _chunk(self, entry: Mapping[str, Any], update: ChoiceUpdate) -> bytes:
        chunk = self._envelope(self.chunk_object, [entry])
        chunk.update(self.chunk_fields(entry))
        if self._usage_in_chunks:
            chunk["usage"] = completion_usage(self._stream.usage(update.num_output_tokens))
        return sse(chunk)

    def _envelope(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        usage = {"usage": completion_usage(self._stream.usage())}
        return usage | {"metrics": self._stream.timings()} if self._include_timings else usage
