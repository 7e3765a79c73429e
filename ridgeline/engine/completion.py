"""The result of a batch call: one Completion per prompt, assembled from its events."""

from __future__ import annotations

import msgspec

from ridgeline.errors import EngineUnavailable
from ridgeline.records import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Request,
    Token,
    TokenLogprobs,
    Usage,
    prediction_totals,
)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One choice. `logprobs` has one entry per token if the sampling requested them."""

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] = ()


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answers to one prompt by choice; `text` and `tokens` are those of the first."""

    prompt: tuple[int, ...]
    answers: tuple[Answer, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.answers[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.answers[0].tokens


class CompletionBuilder:
    """Collects the events of one request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tokens: list[list[Token]] = [[] for _ in range(request.sampling.n)]
        self._ends: dict[int, Finished] = {}

    @property
    def is_done(self) -> bool:
        """True once every choice has ended."""
        return len(self._ends) == self._request.sampling.n

    def add(self, event: Event) -> None:
        """Take an event. Raises EngineUnavailable if the request failed."""
        if isinstance(event, Token):
            self._tokens[event.index].append(event)
        elif isinstance(event, Finished):
            self._ends[event.index] = event
        elif isinstance(event, Failed):
            raise EngineUnavailable(f"request {event.request_id} failed: {event.error}")

    def build(self) -> Completion:
        """The completion; every choice must have ended."""
        ends = [self._ends[index] for index in range(len(self._tokens))]
        first = next((tokens[0] for tokens in self._tokens if tokens), None)
        return Completion(
            prompt=self._request.prompt,
            answers=tuple(map(_answer, self._tokens, ends)),
            usage=Usage(
                prompt_tokens=len(self._request.prompt),
                cached_tokens=ends[0].usage.cached_tokens,
                completion_tokens=sum(end.usage.completion_tokens for end in ends),
                **prediction_totals([end.usage for end in ends]),
            ),
            prompt_logprobs=None if first is None else first.prompt_logprobs,
        )


def _answer(tokens: list[Token], end: Finished) -> Answer:
    return Answer(
        index=end.index,
        text="".join(token.text for token in tokens) + end.text,
        tokens=tuple(token.token for token in tokens),
        finish_reason=end.reason,
        stop_reason=end.stop_reason,
        logprobs=tuple(token.logprobs for token in tokens if token.logprobs is not None),
    )
