"""Every exception that Ridgeline raises deliberately.

    RidgelineError
    ├── UserError          the caller can fix it: carries the value, the limit and the fix
    │   ├── BadInput       an option, request, SLO or workload is malformed or out of range
    │   │   └── BadGrammar a schema, regex, choice or grammar of a request cannot be used
    │   ├── BadModel       a model directory is missing, inconsistent, unsafe or unsupported
    │   ├── CannotRun      this model or machine cannot run the requested technique
    │   ├── DoesNotFit     weights or KV cache exceed the memory budget
    │   ├── DownloadFailed a model is not here and could not be downloaded
    │   └── Inconclusive   a measurement was disturbed, so that it decides nothing
    └── EngineUnavailable  the engine is stopped or dead; the request itself was valid
        ├── EngineFull     the queue is full; says when to retry
        └── RankFailed     a process of a parallel engine ended or does not answer

`assert` is reserved for internal invariants; it never validates user input.
"""

from __future__ import annotations

DECODE_ERRORS = (ValueError, RecursionError)
"""What decoders raise for malformed data: json, msgspec, tomllib and UTF-8 raise subclasses of
ValueError, and all of them RecursionError where values are nested too deeply."""
_MAX_PART_CHARS = 600


class RidgelineError(Exception):
    """Base of every deliberate exception."""


class UserError(RidgelineError):
    """A mistake that the caller can fix.

    `what` names the problem, `value` is the offending input, `limit` is what would be accepted, and
    `fix` says what to do.
    """

    def __init__(
        self, what: str, *, value: object = None, limit: object = None, fix: str | None = None
    ) -> None:
        self.what, self.value, self.limit, self.fix = what, value, limit, fix
        super().__init__(self._render())

    def _render(self) -> str:
        parts = [_shorten(self.what)]
        if self.value is not None:
            shown = repr(self.value) if isinstance(self.value, str) else str(self.value)
            parts.append(f"got {_shorten(shown)}")
        if self.limit is not None:
            parts.append(f"limit: {self.limit}")
        if self.fix:
            parts.append(f"fix: {_shorten(self.fix)}")
        return "; ".join(parts)


def _shorten(text: str) -> str:
    """A file may have a name or a value of any length; a message has not."""
    return text if len(text) <= _MAX_PART_CHARS else f"{text[:_MAX_PART_CHARS]}…"


class BadInput(UserError):
    """An option, request, SLO or workload is malformed or out of range."""


class BadGrammar(BadInput):
    """A schema, regex, choice or grammar for structured output cannot be used."""


class BadModel(UserError):
    """A model directory is missing, inconsistent, unsafe or unsupported."""


class CannotRun(UserError):
    """This model or machine cannot run the requested technique. There is no silent fallback."""


class DoesNotFit(UserError):
    """Weights or KV cache exceed the memory budget."""


class DownloadFailed(UserError):
    """A model is not here and could not be downloaded: the network, the hub or the file failed."""


class Inconclusive(UserError):
    """A measurement was disturbed, or lasted too short a time, to decide anything."""


class EngineUnavailable(RidgelineError):
    """The engine is stopped, dead or full."""


class EngineFull(EngineUnavailable):
    """The queue is full, or admission would violate an SLO: retry after `retry_after_s`."""

    def __init__(self, message: str, *, reason: str, retry_after_s: float) -> None:
        self.reason, self.retry_after_s = reason, retry_after_s
        super().__init__(message)


class RankFailed(EngineUnavailable):
    """A process of a parallel engine ended or does not answer, so the engine stops."""
