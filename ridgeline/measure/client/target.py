"""Of whom a load asks: the `Target` Protocol, and the `Recorder` that a target notes events in.

A target is told the request and a recorder, and returns when the request has ended. What it noted
survives a timeout, a cancellation or an exception, so that a request that broke off half-way is
still a record. All instants are on the recorder's clock: seconds since the start of the run, at
the client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ridgeline.measure.workload.base import LoadRequest
from ridgeline.records import CountedBy, EngineInfo, RequestTrace, StepStat

Now = Callable[[], float]


class Recorder:
    """The mutable record of a request in flight; the client owns it, the target writes to it."""

    __slots__ = (
        "_counts",
        "_error",
        "_finished_s",
        "_instants",
        "_reason",
        "_texts",
        "_usage",
        "cached_tokens",
        "counted_by",
        "first_computed_s",
        "now",
        "prompt_tokens",
        "started_s",
    )

    def __init__(self, now: Now) -> None:
        self.now = now
        self.started_s: float | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.counted_by: CountedBy = "server"
        self.first_computed_s: float | None = None
        self._instants: list[float] = []
        self._counts: list[int] = []
        self._texts: list[str] = []
        self._usage: int | None = None
        self._finished_s: float | None = None
        self._reason: str | None = None
        self._error: str | None = None

    def started(self, at_s: float, *, cached_tokens: int = 0) -> None:
        """The server first ran the request. Only the first time counts (a preempted one starts
        again).
        """
        if self.started_s is None:
            self.started_s = at_s
            self.cached_tokens = cached_tokens or self.cached_tokens

    def chunk(self, text: str, num_tokens: int = 1, *, at_s: float | None = None) -> None:
        """Output arrived that stands for `num_tokens` tokens (its text may be empty)."""
        self._instants.append(self.now() if at_s is None else at_s)
        self._counts.append(num_tokens)
        self._texts.append(text)

    def more(self, text: str) -> None:
        """The last chunk held one more token: several tokens of one step are one chunk."""
        self._counts[-1] += 1
        self._texts.append(text)

    def tail(self, text: str) -> None:
        """Text that belongs to no further token (it was held back until the end)."""
        self._texts.append(text)

    def finished(
        self,
        reason: str | None,
        *,
        prompt_tokens: int,
        output_tokens: int | None,
        cached_tokens: int = 0,
    ) -> None:
        """The request was served. `output_tokens` None: the server did not count, the chunks do."""
        if self.ended:
            return
        self._finished_s, self._reason = self.now(), reason
        self.prompt_tokens, self._usage = prompt_tokens, output_tokens
        self.cached_tokens = cached_tokens

    def failed(self, error: str, *, reason: str | None = None) -> None:
        """The request broke off. The first end wins: what follows it is usually its echo."""
        if not self.ended:
            self._finished_s, self._error, self._reason = self.now(), error, reason

    @property
    def ended(self) -> bool:
        return self._finished_s is not None

    def trace(self, request: LoadRequest, scheduled_s: float, sent_s: float) -> RequestTrace:
        """The finished record. Tokens are the server's count where it gave one, else those seen. No
        server starts before the send, whatever its clock says.
        """
        return RequestTrace(
            id=request.id,
            kind=request.kind,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            started_s=None if self.started_s is None else max(self.started_s, sent_s),
            token_s=tuple(self._instants),
            token_counts=tuple(self._counts),
            finished_s=self._finished_s,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=sum(self._counts) if self._usage is None else self._usage,
            asked_tokens=request.max_tokens,
            finish_reason=self._reason,
            error=self._error,
            text="".join(self._texts),
            counted_by=self.counted_by,
            first_computed_s=self.first_computed_s,
        )


class Target(Protocol):
    """A server of requests. `send` never raises for a request that failed: it notes the failure."""

    @property
    def name(self) -> str: ...

    @property
    def info(self) -> EngineInfo | None:
        """What is being served; None where the server does not tell."""
        ...

    async def send(self, request: LoadRequest, record: Recorder) -> None:
        """Serve one request to its end. When cancelled, the server must stop working on it."""
        ...

    def drain_steps(self, now: Now) -> tuple[StepStat, ...]:
        """The engine steps since the last call, their instants on `now`'s clock; () where
        unknown.
        """
        ...

    async def close(self) -> None: ...
