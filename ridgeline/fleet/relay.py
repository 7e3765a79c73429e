"""What a gateway knows of a stream that it relays: how far the client has it, and how to go on.

Bytes are passed on as they come, up to the end of the last whole event: a client never gets half
an event, so that what follows a failure fits. Behind Ridgeline the stream has a comment after every
update (`serve/generation/resume.py`): it is taken out and kept, and read only if the backend fails.
"""

from __future__ import annotations

import re
from zlib import crc32

import msgspec

from ridgeline.serve.config import LIMITS
from ridgeline.serve.generation.resume import ResumePoint, StreamIdentity

_MAX_HELD_BYTES = 1 << 20
_SUM_BITS = 0xFFFFFF
_NOTHING = (0, 0)


class BrokenStream(Exception):
    """The backend's stream is not one of server-sent events, or not the one that the client has."""


_ERROR = re.compile(rb'^(?:event: error$|data: \{"error":)', re.MULTILINE)
_CHOICE = r"\d{1,7}-[0-9a-f]{6}"
_EVENT_ID = re.compile(
    r"([!-~]{1,100})/(\d{1,12})\.(-?\d{1,20})\.([0-9a-f]{12})\."
    rf"(o?)((?:{_CHOICE}(?:_{_CHOICE}){{0,{LIMITS.max_choices - 1}}})?)(e?)"
)


class StreamPosition:
    """How far a client has a stream: its opening, the updates of each choice, its end.

    As text it is the id of an event, from which any gateway can have the rest of the stream
    produced again: `RESPONSE/CREATED.SEED.REQUEST.UPDATES`, where REQUEST is the beginning of the
    digest of the request, and UPDATES as `o12-5c01d2_9-00b7fe`: how many of each choice, and a
    checksum of their tokens; `e` at the end.
    """

    def __init__(self, request: bytes) -> None:
        self.request = request.hex()[:12]
        self.identity: StreamIdentity | None = None
        self.has_opening = self.has_end = False
        self.counts: list[int] = []
        self.sums: list[int] = []

    @staticmethod
    def parse(text: str, request: bytes) -> StreamPosition | None:
        """The position in an event's id; None if it is none, or one of another request."""
        match, position = _EVENT_ID.fullmatch(text), StreamPosition(request)
        if match is None or match[4] != position.request:
            return None
        position.identity = StreamIdentity(id=match[1], created=int(match[2]), seed=int(match[3]))
        position.has_opening, position.has_end = bool(match[5]), bool(match[7])
        choices = [choice.split("-") for choice in match[6].split("_") if choice]
        position.counts = [int(count) for count, _ in choices]
        position.sums = [int(checksum, 16) for _, checksum in choices]
        return position

    def event_id(self, identity: StreamIdentity) -> str:
        """The position in the stream of that identity, as an id of its latest event."""
        choices = zip(self.counts, self.sums, strict=True)
        counts = "_".join([f"{count}-{checksum:06x}" for count, checksum in choices])
        updates = f"{'o' if self.has_opening else ''}{counts}{'e' if self.has_end else ''}"
        return f"{identity.id}/{identity.created}.{identity.seed}.{self.request}.{updates}"

    def holds(self, mark: bytes, number: int) -> bool:
        """Whether it lies behind the update with that comment, the `number`-th of its choice."""
        if mark in (b"open", b"end"):
            return self.has_opening if mark == b"open" else self.has_end
        choice = choice_of(mark)
        return choice < len(self.counts) and number <= self.counts[choice]

    def advance(self, mark: bytes, number: int, checksum: int) -> bool:
        """The client gets that update, or has it; False if it has others. `checksum`: that of the
        choice's tokens so far."""
        if mark in (b"open", b"end"):
            self.has_opening |= mark == b"open"
            self.has_end |= mark == b"end"
            return True
        choice = choice_of(mark)
        missing = [0] * (choice + 1 - len(self.counts))
        self.counts += missing
        self.sums += missing
        if number > self.counts[choice]:
            self.counts[choice], self.sums[choice] = number, checksum & _SUM_BITS
        return number < self.counts[choice] or checksum & _SUM_BITS == self.sums[choice]


def choice_of(mark: bytes) -> int:
    """The choice of an update."""
    return int(mark.partition(b":")[0])


class StreamRelay:
    """One stream, over all the backends that produce it.

    `identity`: None behind other servers. `num_units`: updates that backends have produced.
    `position`: where its client wants ids of the events; what lies before it is not passed on.
    `has_output`: its present backend has produced a token, or the end of a choice. `is_other`: what
    was computed again is not what the client has.
    """

    def __init__(self, position: StreamPosition | None = None) -> None:
        self.position = position
        self.identity = None if position is None else position.identity
        self._is_continued = self.identity is not None
        self.has_ended = self.is_migrating = self.has_output = self.is_other = False
        self.num_units = 0
        # updates of each choice and the checksum of their tokens, where there is a position
        self._known: dict[bytes, tuple[int, int]] = {}
        self._marks = bytearray()  # comments, one per line
        self._held = b""

    @property
    def is_resumable(self) -> bool:
        return self.identity is not None

    @property
    def is_bound(self) -> bool:
        """Whether its client has a part of it that only its own continuation fits."""
        return self.identity is not None and (bool(self._marks) or self._is_continued)

    def begin(self, identity: bytes | None) -> None:
        """A backend begins to answer. `identity`: the header of a resumable stream."""
        self._held, self.is_migrating, self.has_output = b"", False, False
        if not self.is_bound:  # the client has nothing of an earlier one
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
        """From where a backend has to go on; None if the client has nothing that binds it."""
        if self.identity is None or not self.is_bound:
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
            is_new = self._take_mark(data[mark + 2 : end], data[start:mark])
            if mark > start and self.position is not None and self.identity is not None:
                if is_new:
                    event_id = self.position.event_id(self.identity).encode()
                    passed.append(b"%bid: %b\n\n" % (data[start : mark - 1], event_id))
            elif mark > start:
                passed.append(data[start:mark])
            start = end + 2
            if start == len(data):
                break
        self._held = data[start:]
        return passed[0] if len(passed) == 1 else b"".join(passed)

    def take_over(self, earlier: StreamRelay) -> None:
        """Begin with the known part of the same stream, up to the position: it need not be
        produced again. BrokenStream if the client has another part."""
        assert self.position is not None
        for mark in bytes(earlier._marks).splitlines():
            number = self._number(mark)
            if self.position.holds(mark, number) and mark.partition(b":")[2]:
                self._note_mark(mark, number)
        if self.position.has_opening:
            self._note_mark(b"open", 1)

    def _take_mark(self, mark: bytes, events: bytes) -> bool:
        """Note an update; whether it is new to the client. Raises BrokenStream."""
        if mark == b"migrate":
            self.is_migrating = True
            return True
        self.has_ended |= mark == b"end"
        self.has_output |= b":" in mark
        number = 0 if self.position is None else self._number(mark)
        is_new = self.position is None or not self.position.holds(mark, number)
        self._note_mark(mark, number)
        if mark == b"end" and self.position is not None and not _ERROR.search(events):
            self._check_end(self.position)
        return is_new

    def _number(self, mark: bytes) -> int:
        """The number of an update that comes now, among those of its choice."""
        return self._known.get(mark.partition(b":")[0], _NOTHING)[0] + 1

    def _note_mark(self, mark: bytes, number: int) -> None:
        self.num_units += 1
        self._marks += mark + b"\n"
        if self.position is not None:
            self._compare(self.position, mark, number)

    def _compare(self, position: StreamPosition, mark: bytes, number: int) -> None:
        """Go on to an update. BrokenStream if what comes is not what the client has of it."""
        choice, colon, token = mark.partition(b":")
        checksum = self._known.get(choice, _NOTHING)[1]
        if token:
            checksum = crc32(token + b" ", checksum)
        if colon:
            self._known[choice] = number, checksum
        if not position.advance(mark, number, checksum):
            self.is_other = True
            raise BrokenStream

    def _check_end(self, position: StreamPosition) -> None:
        """BrokenStream if what was computed again has ended before the position."""
        own = [self._known.get(b"%d" % i, _NOTHING)[1] for i in range(len(position.sums))]
        if [checksum & _SUM_BITS for checksum in own] != position.sums:
            self.is_other = True
            raise BrokenStream
