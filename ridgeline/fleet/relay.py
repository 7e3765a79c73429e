"""What a gateway knows of a stream that it relays: how far the client has it, and how to go on.

Bytes are passed on as they come, up to the end of the last whole event: a client never gets half
an event, so that what follows a failure fits. Behind Ridgeline the stream has a comment after every
update (`serve/generation/resume.py`): it is taken out and kept, and read only if the backend fails.
"""

from __future__ import annotations

import msgspec

from ridgeline.serve.generation.resume import ResumePoint, StreamIdentity

_MAX_HELD_BYTES = 1 << 20


class BrokenStream(Exception):
    """The backend's stream is not one of server-sent events."""


class StreamRelay:
    """One stream, over all the backends that produce it.

    `identity`: None behind other servers. `num_units`: updates that were passed on. `adds_ids`:
    each of them ends with an id for the client, `RESPONSE/NUMBER`.
    """

    def __init__(self) -> None:
        self.identity: StreamIdentity | None = None
        self.has_ended = self.is_migrating = False
        self.adds_ids = False
        self.num_units = 0
        self._marks = bytearray()  # comments, one per line
        self._held = b""

    @property
    def is_resumable(self) -> bool:
        return self.identity is not None

    def begin(self, identity: bytes | None) -> None:
        """A backend begins to answer. `identity`: the header of a resumable stream."""
        self._held, self.is_migrating = b"", False
        if not self._marks:  # the client has nothing of an earlier one
            self.identity = None
        if self.identity is None and identity is not None:
            self.identity = msgspec.json.decode(identity, type=StreamIdentity)

    def feed(self, data: bytes) -> bytes:
        """The part of `data`, and of bytes held back before, that may be passed on."""
        if self._held:
            data = self._held + data
        passed = self._feed_marked(data) if self.identity is not None else self._feed_plain(data)
        if len(self._held) > _MAX_HELD_BYTES:
            raise BrokenStream
        return passed

    def flush(self) -> bytes:
        """What is held back of a complete stream of another server."""
        held, self._held = self._held, b""
        return held if self.identity is None else b""

    def resume_point(self) -> ResumePoint | None:
        """Where the client's stream ends; None if nothing was passed on that binds it."""
        if self.identity is None or not self._marks:
            return None
        tokens: list[list[int]] = []
        opened = False
        for mark in self._marks.splitlines():
            choice, colon, token = mark.partition(b":")
            if not colon:
                opened = opened or mark == b"open"
            elif token:
                while len(tokens) <= int(choice):
                    tokens.append([])
                tokens[int(choice)].append(int(token))
        return ResumePoint(
            **msgspec.structs.asdict(self.identity),
            opened=opened,
            tokens=tuple(map(tuple, tokens)),
        )

    def _feed_plain(self, data: bytes) -> bytes:
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        if end < 4:
            self._held = data
            return b""
        self._held = data[end:]
        return data[:end] if self._held else data

    def _feed_marked(self, data: bytes) -> bytes:
        """Cut the comments out. JSON has no raw line break: `\\n\\n: ` begins a comment."""
        passed: list[bytes] = []
        start = 0
        while True:
            if data.startswith(b": ", start):
                mark = start
            else:
                mark = data.find(b"\n\n: ", start) + 2
                if mark < 2:
                    break
            end = data.find(b"\n\n", mark)
            if end < 0:
                break
            self._take_mark(data[mark + 2 : end])
            if mark > start and self.adds_ids:
                passed.append(data[start : mark - 1] + self._event_id())
            elif mark > start:
                passed.append(data[start:mark])
            start = end + 2
            if start == len(data):
                break
        self._held = data[start:]
        return passed[0] if len(passed) == 1 else b"".join(passed)

    def up_to(self, num_units: int) -> StreamRelay | None:
        """The stream as it was after `num_units` updates; None if it has fewer."""
        if num_units > self.num_units:
            return None
        earlier = StreamRelay()
        earlier.identity, earlier.adds_ids, earlier.num_units = self.identity, True, num_units
        earlier._marks += b"".join(self._marks.splitlines(keepends=True)[:num_units])
        return earlier

    def _event_id(self) -> bytes:
        assert self.identity is not None
        return b"id: %b/%d\n\n" % (self.identity.id.encode(), self.num_units)

    def _take_mark(self, mark: bytes) -> None:
        if mark == b"migrate":
            self.is_migrating = True
            return
        if mark == b"end":
            self.has_ended = True
        self.num_units += 1
        self._marks += mark + b"\n"
