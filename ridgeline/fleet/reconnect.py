"""Streams that a client may continue after losing its connection, by the id of its last event.

A client that sends `x-ridgeline-event-ids` gets an id, a `StreamPosition`, with the last event of
every update. To continue, it sends the same body again with `Last-Event-ID`. The tokens of its
stream are kept for two minutes by the gateway that had it. Another gateway, or this one later, has
them computed again, and leaves out what the client has. Servers with the same weights, settings,
version and kind of CPU or GPU compute the same; where the checksum of the tokens differs, the
answer is an error.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import msgspec

from ridgeline.fleet.call import RoutedCall
from ridgeline.fleet.relay import BrokenStream, StreamPosition, StreamRelay
from ridgeline.serve.errors import ApiError

_KEPT_S = 120.0
_MAX_KEPT = 512


class _Kept(msgspec.Struct):
    digest: bytes
    relay: StreamRelay
    until_s: float


class RetainedStreams:
    """Keeps the latest streams, by the id of their response."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def keep(self, call: RoutedCall) -> None:
        """Keep the stream of a call whose client is gone, or may be."""
        identity = call.relay.identity
        if call.relay.is_other:
            assert identity is not None
            self._kept.pop(identity.id, None)
        elif identity is not None:
            until_s = asyncio.get_running_loop().time() + _KEPT_S
            self._kept[identity.id] = _Kept(call.digest, call.relay, until_s)
            self._kept.move_to_end(identity.id)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)

    def continue_from(self, last_event_id: str, digest: bytes) -> StreamRelay:
        """The stream after an event. Raises ApiError for an id that no event of the request has."""
        position = StreamPosition.parse(last_event_id, digest)
        if position is None or position.identity is None:
            raise ApiError(
                400,
                "Last-Event-ID is not the id of an event of this request: send the body that began "
                "the stream, byte by byte, and an id of one of its events",
            )
        relay = StreamRelay(position)
        kept = self._kept.get(position.identity.id)
        if kept is not None and kept.digest == digest and kept.relay.identity == position.identity:
            if asyncio.get_running_loop().time() <= kept.until_s:
                try:
                    relay.take_over(kept.relay)
                except BrokenStream:  # another gateway had other tokens computed
                    return StreamRelay(StreamPosition.parse(last_event_id, digest))
            else:
                del self._kept[position.identity.id]
        return relay
