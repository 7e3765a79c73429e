"""Streams that another server can continue where this one broke off, to the byte.

A gateway sends `x-ridgeline-resumable: 1` with a streamed request. The response then carries

    x-ridgeline-resume: {"id": …, "created": …, "seed": …}   a header: what makes its bytes unique
    : open                                      a comment after the opening events
    : 0:1234                                    after the events of token 1234 of choice 0
    : 0:                                        after those of an end without a token
    : end                                       after the last event
    : migrate                                   in place of an error: continue elsewhere

A comment is a separate block, which readers of server-sent events skip; JSON has no raw line
breaks, so that no event contains one. What precedes a comment is complete. To continue, the same
body goes to any replica with the field `ridgeline_resume`: the header's object, `opened` (whether
`open` was seen) and `tokens`, a list per choice. The response consists of the bytes that are
missing. Randomness is a function of the seed and of the place of a token, and grammars, penalties,
stop strings and parsers are functions of the tokens, so nothing else has to be carried over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import getrandbits
from typing import Any, Protocol

import msgspec

from ridgeline.serve.errors import ApiError

RESUMABLE_HEADER = "x-ridgeline-resumable"
IDENTITY_HEADER = "x-ridgeline-resume"
INSTANCE_HEADER = "x-ridgeline-instance"  # of probes: another one for every process
BATCH_HEADER = "x-ridgeline-batch"  # of probes: STORE=SERVERS, what its open batch requests need
RESUME_FIELD = "ridgeline_resume"
SCOPE_KEY = "ridgeline.resume"
"""Where a request's scope keeps its `ResumePoint`."""
LOG_KEY = "ridgeline.tokens"
"""Where a request's scope may keep a `TokenLog` that is to be filled."""
OPEN, END, MIGRATE = b": open\n\n", b": end\n\n", b": migrate\n\n"
_MAX_ID_CHARS = 100
_MIGRATES = (500, 503)
"""Errors that another replica may not have: this one stops, or its engine failed."""


class StreamIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a response unique: its id, its creation time, and the seed of its sampling."""

    id: str
    created: int
    seed: int

    def header(self) -> dict[str, str]:
        """The identity as a response header."""
        return {IDENTITY_HEADER: msgspec.json.encode(self).decode()}


class ResumePoint(StreamIdentity, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a response broke off: after `tokens`, per choice. `opened`: its opening was sent."""

    opened: bool = False
    tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


class TokenLog:
    """The tokens that a request has so far, per choice: enough to continue it elsewhere."""

    def __init__(self, tokens: Sequence[Sequence[int]] = ()) -> None:
        self.choices = [list(choice) for choice in tokens]

    def append(self, choice: int, token: int) -> None:
        while len(self.choices) <= choice:
            self.choices.append([])
        self.choices[choice].append(token)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.choices))


class ReplayableUpdate(Protocol):
    """What a serializer of comments reads of an update."""

    @property
    def choice(self) -> int: ...

    @property
    def token_id(self) -> int | None: ...

    @property
    def is_replayed(self) -> bool: ...


class StreamSerializer(Protocol):
    """The events of one endpoint."""

    def open(self) -> bytes: ...

    def events(self, update: Any) -> bytes: ...

    def close(self) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...


class ResumableSerializer:
    """Adds comments to the events of an endpoint, and leaves out what was sent before.

    `on_migrate` is called with an error in place of which the stream asks to be continued.
    """

    def __init__(
        self,
        serializer: StreamSerializer,
        point: ResumePoint | None,
        on_migrate: Callable[[ApiError], None],
    ) -> None:
        self._serializer, self._is_open = serializer, point is not None and point.opened
        self._on_migrate = on_migrate

    def open(self) -> bytes:
        """The opening events, unless they were sent before."""
        data = self._serializer.open()
        return b"" if self._is_open else data + OPEN

    def events(self, update: ReplayableUpdate) -> bytes:
        """The events of one update; none for a replayed one, which only the parsers see."""
        data = self._serializer.events(update)
        if update.is_replayed:
            return b""
        token = update.token_id
        return b"%b: %d:%b\n\n" % (data, update.choice, b"" if token is None else b"%d" % token)

    def close(self) -> bytes:
        """The last events."""
        return self._serializer.close() + END

    def error(self, error: ApiError) -> bytes:
        """The error, or the request to continue elsewhere."""
        if error.status_code in _MIGRATES:
            self._on_migrate(error)
            return MIGRATE
        return self._serializer.error(error) + END


def draw_seed() -> int:
    """A seed for a request that names none."""
    return getrandbits(62)


def read_resume_point(value: object) -> ResumePoint:
    """The field `ridgeline_resume` of a body; ApiError 400 if it is malformed."""
    try:
        point = msgspec.convert(value, ResumePoint)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{RESUME_FIELD}: {error}", param=RESUME_FIELD) from None
    if not (point.id.isascii() and point.id.isprintable() and len(point.id) <= _MAX_ID_CHARS):
        raise ApiError(400, f"{RESUME_FIELD}.id is not a response id", param=RESUME_FIELD)
    return point
