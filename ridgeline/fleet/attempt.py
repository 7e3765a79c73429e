"""One backend's turn at a request: what is sent, and how its answer is passed on."""

from __future__ import annotations

import asyncio
import re

import msgspec

from ridgeline.fleet.backends import Backend, Backends
from ridgeline.fleet.call import RoutedCall
from ridgeline.fleet.client_side import ClientResponse
from ridgeline.fleet.parking import Parking
from ridgeline.fleet.prefill.pool import Handle
from ridgeline.fleet.relay import BrokenStream
from ridgeline.fleet.upstream import BackendLost, Headers, UpstreamConnection
from ridgeline.serve.errors import ApiError
from ridgeline.serve.generation.handover import TRANSFER_FIELD
from ridgeline.serve.generation.resume import IDENTITY_HEADER, RESUMABLE_HEADER, RESUME_FIELD

_PAUSE_S = 0.1
_MAX_WHOLE_BYTES = 256 << 20
_PREEMPTED = 10
"""By how much longer a stream that no server could continue may stand still while its server
answers others: it may have been preempted for them."""
_OPENING_PATHS = ("/v1/messages", "/v1/responses")
"""Their streams begin with events before the prompt is computed, and their output is in deltas."""
_DELTA = re.compile(rb'"type": ?"[a-z_.]*delta"')
_OTHER = (
    "the servers compute another answer than the one that this stream began with: send the request "
    "again without Last-Event-ID"
)
_KEPT_BACK = {
    *(b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server"),
    IDENTITY_HEADER.encode(),
}


class Attempt:
    """One backend's turn at a call, and its share of the backend's load until `end`."""

    def __init__(
        self, call: RoutedCall, backend: Backend, backends: Backends, parking: Parking
    ) -> None:
        self.call, self.backend, self._load = call, backend, backends.load
        self._parking, self._verdicts = parking, backends.verdicts
        call.backend, call.num_attempts = str(backend.address), call.num_attempts + 1
        self._now_s, self._stall_s = backends.clock, backends.stall_s
        self._waiting = backends.waiting
        self._waiting[self] = backend.id, self._now_s()
        self._stall_timer: asyncio.TimerHandle | None = None
        self._sent_s, self._num_before = self._now_s(), call.relay.num_units
        self._has_first, self.is_answered = False, False
        self._turn = self._verdicts.begin(call.digest, backend.id, self._sent_s)
        self._is_suspect = call.trial != "none"
        self.handle: Handle | None = None
        call.sent_s, call.first_s = self._sent_s, None
        self._load.note_sent(backend.id, call.num_prompt)
        if self._is_suspect:
            self._begin_trial()

    @property
    def has_progressed(self) -> bool:
        """Whether the client has more of its stream than before."""
        return self.call.relay.num_units > self._num_before

    async def answer(self, connection: UpstreamConnection, response: ClientResponse) -> bool:
        """Relay the response; False if the backend asks another one to continue it.

        Raises BackendLost, BrokenStream, or ApiError if it does not fit what the client has.
        """
        headers = dict(connection.headers)
        if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            body = await connection.read_all(_MAX_WHOLE_BYTES)
            self._note_begun()
            self.call.status, self.call.answer, self.call.num_bytes = 200, body, len(body)
            await response.whole(200, response_headers(connection), body)
            return True
        relay = self.call.relay
        relay.begin(headers.get(IDENTITY_HEADER.encode()))
        try:
            await self._relay(connection, response)
        except (BackendLost, BrokenStream):
            if relay.is_other:
                raise ApiError(409, _OTHER) from None
            if not (relay.is_resumable and relay.has_ended):
                raise
            await response.drain()  # the client has all of it
        if relay.is_resumable and not relay.has_ended:
            if relay.is_migrating:
                return False
            raise BackendLost("its stream has no end", has_begun=True)
        if not response.has_started:
            await response.start(200, response_headers(connection))
        self.call.status = 200
        await response.end(relay.flush())
        return True

    async def _relay(self, connection: UpstreamConnection, response: ClientResponse) -> None:
        """Pass the stream on. Raises BackendLost or BrokenStream, and BackendLost too for a stream
        that stands still once it has output: before, its prompt may be waiting."""
        call, relay = self.call, self.call.relay
        while data := await connection.read():  # until the first whole event
            self._note_first()
            passed = relay.feed(data)
            self._begin_watch(connection, passed)
            if passed:
                if not response.has_started:
                    await response.start(200, response_headers(connection))
                call.num_bytes += len(passed)
                call.num_first_units = relay.num_units if relay.identity else len(passed)
                response.write(passed)
                break

        def pass_on(data: bytes) -> bool:
            try:
                passed = relay.feed(data)
            except BrokenStream:
                connection.close()
                return False
            call.num_bytes += len(passed)
            self._begin_watch(connection, passed)
            return not passed or response.write(passed)

        while not connection.is_complete:
            await response.drain()
            await connection.pump(pass_on)
        await response.drain()
        if rest := connection.take_rest():
            pass_on(rest)
            await response.drain()

    def _begin_watch(self, connection: UpstreamConnection, passed: bytes) -> None:
        """Watch the stream from its first token on."""
        if self._stall_timer is not None:
            return
        if self.call.relay.is_resumable:
            has_output = self.call.relay.has_output
        else:
            is_opened_early = self.call.path in _OPENING_PATHS
            has_output = bool(_DELTA.search(passed) if is_opened_early else passed)
        if has_output:
            self._watch_stall(connection)

    def _watch_stall(self, connection: UpstreamConnection) -> None:
        """Give the stream up if it stands still."""
        limit_s, stood_s = self._stall_s * connection.patience, connection.awaited_for_s
        left_s = limit_s - stood_s
        if not self.call.relay.is_resumable:
            others_s = limit_s - (self._now_s() - self.backend.pool.heard_s)
            left_s = max(left_s, min(others_s, _PREEMPTED * limit_s - stood_s))
        if left_s <= 0:
            connection.give_up(f"its stream has stood still for {stood_s:.0f} s")
            return
        loop = asyncio.get_running_loop()
        self._stall_timer = loop.call_later(left_s, self._watch_stall, connection)

    def note_broken(self) -> None:
        """The backend broke off."""
        is_stopping = self.backend.state == "draining"
        self._verdicts.note_broken(self._turn, self._now_s(), is_stopping=is_stopping)

    def _begin_trial(self) -> None:
        """Keep other suspects away until the call is answered, or has run for twice as long as ever
        before a crash."""
        self.backend.num_suspects += 1
        longest_s = self._verdicts.blame.longest_s(self.call.digest)
        loop = asyncio.get_running_loop()
        self._outlives = loop.call_later(2 * longest_s + _PAUSE_S, self._end_trial)

    def _end_trial(self, *, has_outlived: bool = True) -> None:
        if self._is_suspect:
            self._is_suspect = False
            self.backend.num_suspects -= 1
            if has_outlived:
                self._verdicts.blame.note_outlived(self.call.digest, self._now_s())
            else:
                self._outlives.cancel()
            self._parking.release()

    def end(self) -> None:
        """The backend's turn is over."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        self.call.ended_s = self._now_s()
        self._end_trial(has_outlived=False)
        self._verdicts.end(self._turn, self.call.ended_s, is_answered=self.is_answered)
        self._waiting.pop(self, None)
        if self.handle is not None:
            self.handle.end(self.call, has_first=False)
        if not self._has_first:
            self._load.note_lost(self.backend.id, self.call.num_prompt)
        self._load.note_ended(self.backend.id)

    def _note_begun(self) -> None:
        """The backend has sent something: the call waits for it no longer."""
        self._waiting.pop(self, None)
        if self.call.first_s is None:
            self.call.first_s = self._now_s()

    def _note_first(self) -> None:
        """The first byte of a stream tells how fast its prompt was computed; a whole answer, whose
        output took most of its time, does not."""
        if not self._has_first:
            self._has_first = True
            self._note_begun()
            if self.handle is not None:
                self.handle.end(self.call, has_first=True)
            num_tokens, now_s = self.call.num_prompt, self._now_s()
            self._load.note_first_token(self.backend.id, num_tokens, self._sent_s, now_s)


def request_to_backend(call: RoutedCall, handle: Handle | None) -> tuple[bytes, Headers, bytes]:
    """Path, headers and body for a backend; `handle`: where the prompt has been computed."""
    body, headers = call.body, call.headers
    if call.streamed:
        headers = [*headers, (RESUMABLE_HEADER.encode(), b"1")]
    point = call.relay.resume_point()
    added: dict[str, object] = {} if point is None else {RESUME_FIELD: point}
    if handle is not None:
        added[TRANSFER_FIELD] = handle.fields
    if added:
        body = msgspec.json.encode({**msgspec.json.decode(body), **added})
    return call.path.encode(), headers, body


def response_headers(connection: UpstreamConnection) -> Headers:
    """Those of a backend that its client gets."""
    return [pair for pair in connection.headers if pair[0] not in _KEPT_BACK]
