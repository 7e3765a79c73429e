"""A whole answer, gathered from updates: text, tokens and end of every choice, and the usage."""

from __future__ import annotations

import contextlib
from typing import Any

from ridgeline.records import Finished, Token, TokenLogprobs
from ridgeline.serve.asks import Asks, Job, Update


class Choice:
    """One choice while it grows."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[Token] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self.finished: Finished | None = None

    @property
    def ending(self) -> dict[str, Any]:
        """`finish_reason` and `stop_reason`, null while it runs."""
        end = self.finished
        return {
            "finish_reason": end.reason if end else None,
            "stop_reason": end.stop_reason if end else None,
        }

    def add(self, update: Update) -> None:
        self.text += update.text
        if update.token:
            self.tokens.append(update.token)
            self.prompt_logprobs = update.token.prompt_logprobs or self.prompt_logprobs
        self.finished = update.finished or self.finished


class Tally:
    """All choices of a job, and its usage so far."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._num_tokens = 0
        self._cached = [0] * len(job.prompts)
        self.choices = [Choice() for _ in range(len(job.prompts) * job.sampling.n)]

    def add(self, update: Update) -> None:
        self.choices[update.choice].add(update)
        self.count(update)

    def count(self, update: Update) -> None:
        """Only the usage: what a stream needs, whose text has already gone."""
        self._num_tokens += update.token is not None and not self._job.scores_only
        if update.finished:
            prompt = update.choice // self._job.sampling.n
            self._cached[prompt] = max(self._cached[prompt], update.finished.usage.cached_tokens)

    def usage(self) -> dict[str, Any]:
        """Token counts over all prompts and choices; a prompt counts once whatever n is."""
        num_prompt = sum(len(prompt.tokens) for prompt in self._job.prompts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }


async def gather(asks: Asks, job: Job) -> Tally:
    """Run the job to its end."""
    tally = Tally(job)
    async with asks, contextlib.aclosing(asks.updates()) as updates:
        async for update in updates:
            tally.add(update)
    return tally
