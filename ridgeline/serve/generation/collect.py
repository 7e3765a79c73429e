"""A whole answer, gathered from updates: text, tokens and end of every choice, and the usage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from ridgeline.records import Finished, Token, TokenLogprobs
from ridgeline.serve.generation.stream import Job, RequestGroup, Update


class Choice:
    """One choice while it grows."""

    def __init__(self) -> None:
        self._pieces: list[str] = []  # joined when somebody asks: adding would copy what is there
        self.tokens: list[Token] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self.finished: Finished | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def ending(self) -> dict[str, Any]:
        """`finish_reason` and `stop_reason`, null while it runs."""
        end = self.finished
        return {
            "finish_reason": end.reason if end else None,
            "stop_reason": end.stop_reason if end else None,
        }

    def add(self, update: Update) -> None:
        self._pieces.append(update.text)
        if update.token:
            self.tokens.append(update.token)
            self.prompt_logprobs = update.token.prompt_logprobs or self.prompt_logprobs
        self.finished = update.finished or self.finished


class Tally:
    """All choices of a job, and its usage so far."""

    def __init__(self, job: Job, group: RequestGroup) -> None:
        self._job, self._group = job, group
        self._num_tokens = 0
        self.choices = [Choice() for _ in range(len(job.prompts) * job.sampling.n)]

    def add(self, update: Update) -> None:
        self.choices[update.choice].add(update)
        self.count(update)

    def add_all(self, updates: Iterable[Update]) -> None:
        for update in updates:
            self.add(update)

    def count(self, update: Update) -> None:
        """Only the usage: what a stream needs, whose text has already gone."""
        self._num_tokens += update.token is not None and not self._job.scores_only

    def count_token(self) -> None:
        """As `count`, of a token that came alone."""
        self._num_tokens += not self._job.scores_only

    def count_carried(self, num_tokens: int) -> None:
        """As `count`, of tokens that a courier has told."""
        self._num_tokens += num_tokens

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._num_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return sum(self._group.cached)

    def timings(self) -> dict[str, float | None]:
        """When things happened to the first prompt, in the words of vLLM's `metrics` object."""
        return self._group.meters[0].timings()

    def usage(self) -> dict[str, Any]:
        """Token counts over all prompts and choices; a prompt counts once whatever n is."""
        num_prompt = self._job.num_prompt_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def gather(group: RequestGroup, tally: Tally) -> None:
    """Run the requests to their end."""
    with contextlib.closing(group):
        await group.run(tally.add_all)
