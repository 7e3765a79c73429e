"""Which running servers are twins, so that every report about one can say so."""

from __future__ import annotations

import urllib.request

import msgspec

from ridgeline.http_replies import open_reply
from ridgeline.measure.client.http_target import authorization
from ridgeline.measure.monitors.server_metrics import identify_server, parse_page
from ridgeline.optimize.drivers.server_process import models_url
from ridgeline.records.trace import twin_speed
from ridgeline.twin.marks import HEADER

TIMEOUT_S = 10.0


class TwinMark(msgspec.Struct, frozen=True, kw_only=True):
    """What a twin says of itself: its devices, and the server that it imitates, if it has metrics.

    `devices`: as in "1 x h100-sxm, modelled".
    """

    devices: str
    server: str | None

    @property
    def device(self) -> str:
        """The name of the device in the catalogue."""
        return self.devices.partition(" x ")[2].partition(",")[0]

    @property
    def speed(self) -> float:
        """Its modelled seconds per second."""
        return twin_speed(self.devices)

    def __str__(self) -> str:
        server = "" if self.server is None else f" of {self.server}"
        return f"a twin{server}: {self.devices}"


def read_twin(url: str, api_key: str | None = None) -> TwinMark | None:
    """The mark that a twin puts on every response; None for any other server, or without answer."""
    address = models_url(url)
    page_address = address.removesuffix("/v1/models") + "/metrics"
    devices, _ = _get(address, api_key)
    if devices is None:
        return None
    _, page = _get(page_address, api_key)
    return TwinMark(devices=devices, server=identify_server(parse_page(page)))


def _get(url: str, api_key: str | None) -> tuple[str | None, str]:
    """The mark of a response, and its text; "" for an error."""
    request = urllib.request.Request(url, headers=authorization(api_key))
    try:
        with open_reply(request, TIMEOUT_S) as reply:
            return reply.headers.get(HEADER), reply.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return None, ""
