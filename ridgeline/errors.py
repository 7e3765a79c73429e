"""Every error that Ridgeline raises on purpose.

    RidgelineError
    ├── UserError          the caller can mend it: carries the value, the limit and the fix
    │   ├── BadInput       a flag, a request, an SLO or workload string is malformed or out of range
    │   ├── BadModel       a model directory that is missing, inconsistent, unsafe or unsupported
    │   ├── CannotRun      a technique was asked for that this model or machine cannot run
    │   └── DoesNotFit     weights or KV cache exceed the memory budget
    └── EngineUnavailable  the engine is stopped or dead; the request itself was fine
        └── EngineFull     or its queue is full, and when it pays to come back

`assert` is kept for Ridgeline's own invariants; it never validates what a user wrote.
"""

from __future__ import annotations


class RidgelineError(Exception):
    """Base of every deliberate error."""


class UserError(RidgelineError):
    """A mistake that the caller can mend.

    `what` says what is wrong, `value` what was given, `limit` what would be allowed, `fix` what to
    do.
    """

    def __init__(
        self, what: str, *, value: object = None, limit: object = None, fix: str | None = None
    ) -> None:
        self.what, self.value, self.limit, self.fix = what, value, limit, fix
        super().__init__(self._render())

    def _render(self) -> str:
        parts = [self.what]
        if self.value is not None:
            shown = repr(self.value) if isinstance(self.value, str) else self.value
            parts.append(f"got {shown}")
        if self.limit is not None:
            parts.append(f"limit: {self.limit}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return "; ".join(parts)


class BadInput(UserError):
    """A flag, request, SLO or workload string is malformed or out of range."""


class BadModel(UserError):
    """A model directory is missing, inconsistent, unsafe or unsupported."""


class CannotRun(UserError):
    """A technique was asked for that this model or machine cannot run. Never a silent fallback."""


class DoesNotFit(UserError):
    """Weights or KV cache exceed the memory budget."""


class EngineUnavailable(RidgelineError):
    """The engine is stopped, dead or full."""


class EngineFull(EngineUnavailable):
    """The queue is full, or a promise would be broken: come back after `retry_after_s`."""

    def __init__(self, message: str, *, reason: str, retry_after_s: float) -> None:
        self.reason, self.retry_after_s = reason, retry_after_s
        super().__init__(message)
