"""Streams that a client may continue after losing its connection, by the id of its last event.

A client that sends `x-ridgeline-event-ids` gets ids `RESPONSE/NUMBER`. To continue, it sends the
same body again with `Last-Event-ID`. What its stream consisted of is kept here for two minutes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import msgspec

from ridgeline.fleet.call import RoutedCall
from ridgeline.fleet.relay import StreamRelay

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
        if identity is not None:
            until_s = asyncio.get_running_loop().time() + _KEPT_S
            self._kept[identity.id] = _Kept(call.digest, call.relay, until_s)
            self._kept.move_to_end(identity.id)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)

    def find(self, last_event_id: str, digest: bytes) -> StreamRelay | None:
        """The stream up to an event; None if it is not known, or belongs to another request."""
        response_id, _, number = last_event_id.rpartition("/")
        kept = self._kept.get(response_id)
        if kept is None or kept.digest != digest or not number.isdecimal():
            return None
        if asyncio.get_running_loop().time() > kept.until_s:
            del self._kept[response_id]
            return None
        return kept.relay.up_to(int(number))
