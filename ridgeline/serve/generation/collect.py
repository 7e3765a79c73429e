"""A whole response, collected from a stream."""

from __future__ import annotations

import contextlib

from ridgeline.records import Finished, FinishReason, Token, TokenLogprobs
from ridgeline.serve.config import LIMITS
from ridgeline.serve.errors import check_limit
from ridgeline.serve.generation.stream import ChoiceUpdate, ResponseStream


class CollectedChoice:
    """Text, tokens and end of one choice."""

    def __init__(self, *updates: ChoiceUpdate) -> None:
        self._pieces: list[str] = []  # joined on demand: appending to a string would copy it
        self.tokens: list[Token] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self.finished: Finished | None = None
        for update in updates:
            self.add(update)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.finished.reason if self.finished else None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token that ended the choice, if one did."""
        return self.finished.stop_reason if self.finished else None

    def add(self, update: ChoiceUpdate) -> None:
        self._pieces.append(update.text)
        if update.token:
            self.tokens.append(update.token)
            self.prompt_logprobs = update.token.prompt_logprobs or self.prompt_logprobs
        self.finished = update.finished or self.finished


async def collect(stream: ResponseStream) -> list[CollectedChoice]:
    """Read the stream to its end.

    ApiError 400 if it has more log-probabilities than may be held; the request is then aborted.
    """
    choices = [CollectedChoice() for _ in range(stream.request.num_choices)]
    num_logprobs = 0
    with contextlib.closing(stream):
        async for updates in stream:
            for update in updates:
                choices[update.choice].add(update)
                if update.token and update.token.logprobs:
                    num_logprobs += 1 + len(update.token.logprobs.top)
            what = "log-probabilities in a response that is not streamed"
            check_limit("logprobs", num_logprobs, LIMITS.max_held_logprobs, what)
    return choices
