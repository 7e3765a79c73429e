"""The `LoadTarget` protocol, and the `Recorder` in which a target records the events of a request.

`LoadTarget.send` returns when the request has ended. Recorded events survive a timeout, a
cancellation or an exception, so that an interrupted request still leaves a trace. All times are on
the recorder's clock: seconds since the start of the run, at the client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ridgeline.measure.workload.base import LoadRequest
from ridgeline.records import CountedBy, EngineInfo, RequestTrace, StepStat

Now = Callable[[], float]


class Recorder:
    """Events of a request in flight. The load client owns it, the target writes to it."""

    __slots__ = (
        "_counts",
        "_error",
        "_finished_s",
        "_reason",
        "_reasoned",
        "_texts",
        "_times_s",
        "_usage",
        "_visible_s",
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
        self._reasoned = False
        self._visible_s: float | None = None
        self._times_s: list[float] = []
        self._counts: list[int] = []
        self._texts: list[str] = []
        self._usage: int | None = None
        self._finished_s: float | None = None
        self._reason: str | None = None
        self._error: str | None = None

    def record_start(self, at_s: float, *, cached_tokens: int = 0) -> None:
        """The server runs the request.

        Only the first call counts: preempted requests start again.
        """
        if self.started_s is None:
            self.started_s = at_s
            self.cached_tokens = cached_tokens or self.cached_tokens

    def record_reasoning(self, visible_s: float | None) -> None:
        """The output began with reasoning; its answer began at `visible_s`, or never."""
        self._reasoned, self._visible_s = True, visible_s

    def record_chunk(self, text: str, num_tokens: int = 1, *, at_s: float | None = None) -> None:
        """A chunk of `num_tokens` output tokens arrived; its text may be empty."""
        self._times_s.append(self.now() if at_s is None else at_s)
        self._counts.append(num_tokens)
        self._texts.append(text)

    def extend_chunk(self, text: str) -> None:
        """Add a token to the last chunk: tokens of one step are one chunk."""
        self._counts[-1] += 1
        self._texts.append(text)

    def append_text(self, text: str) -> None:
        """Add text without a token: it was held back until the end."""
        self._texts.append(text)

    def record_finish(
        self,
        reason: str | None,
        *,
        prompt_tokens: int,
        output_tokens: int | None,
        cached_tokens: int = 0,
    ) -> None:
        """The request was served. `output_tokens` None: the tokens of the chunks are counted."""
        if self.has_ended:
            return
        self._finished_s, self._reason = self.now(), reason
        self.prompt_tokens, self._usage = prompt_tokens, output_tokens
        self.cached_tokens = cached_tokens

    def record_failure(self, error: str, *, reason: str | None = None) -> None:
        """The request failed. Only the first end counts: later errors usually follow from it."""
        if not self.has_ended:
            self._finished_s, self._error, self._reason = self.now(), error, reason

    @property
    def has_ended(self) -> bool:
        return self._finished_s is not None

    def to_trace(self, request: LoadRequest, scheduled_s: float, sent_s: float) -> RequestTrace:
        """The trace of the ended request.

        Output tokens are the server's count if it gave one, else those of the chunks. `started_s`
        is never before `sent_s`, whatever the server's clock says.
        """
        return RequestTrace(
            id=request.id,
            kind=request.kind,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            started_s=None if self.started_s is None else max(self.started_s, sent_s),
            token_s=tuple(self._times_s),
            token_counts=tuple(self._counts),
            finished_s=self._finished_s,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=sum(self._counts) if self._usage is None else self._usage,
            requested_tokens=request.max_tokens,
            finish_reason=self._reason,
            error=self._error,
            text="".join(self._texts),
            counted_by=self.counted_by,
            first_computed_s=self.first_computed_s,
            reasoned=self._reasoned,
            visible_s=self._visible_s,
        )


class LoadTarget(Protocol):
    """An engine or server under load."""

    @property
    def name(self) -> str: ...

    @property
    def info(self) -> EngineInfo | None:
        """The served model and its settings; None if the server does not report them."""
        ...

    async def send(self, request: LoadRequest, record: Recorder) -> None:
        """Send one request and record its events until it ends.

        A failed request is recorded, not raised. If cancelled, the server must stop working on it.
        """
        ...

    def drain_steps(self, now: Now) -> tuple[StepStat, ...]:
        """Engine steps since the last call, in times of the clock `now`; () if unknown."""
        ...

    async def close(self) -> None: ...
