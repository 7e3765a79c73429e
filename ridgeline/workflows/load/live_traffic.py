"""Reads the traffic of a running server from its metrics, for a while; no prompt is read."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

from ridgeline.errors import CannotRun
from ridgeline.http_replies import open_reply
from ridgeline.measure.client.http_target import authorization
from ridgeline.measure.monitors.traffic import (
    TrafficReading,
    TrafficSample,
    read_page,
    traffic_between,
)
from ridgeline.optimize.drivers.server_process import models_url

PAGE_TIMEOUT_S = 10.0


def read_traffic(url: str, api_key: str | None, at_s: float) -> TrafficReading:
    """The server's counters now. Raises CannotRun if its metrics cannot be read."""
    address = models_url(url).removesuffix("/v1/models") + "/metrics"
    request = urllib.request.Request(address, headers=authorization(api_key))
    try:
        with open_reply(request, PAGE_TIMEOUT_S) as reply:
            page = reply.read().decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        what = "the server's metrics cannot be read"
        raise CannotRun(what, value=address, fix=str(error)) from None
    return read_page(page, at_s)


def sample_live_traffic(
    read: Callable[[], TrafficReading],
    url: str,
    periods: tuple[float, float],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> TrafficSample:
    """The traffic between the first and the last `read`; `periods`: (duration, interval) in s.

    Raises CannotRun without a request in the meantime.
    """
    duration, interval = periods
    start_s = clock()
    readings = [read()]
    while clock() - start_s < duration:
        sleep(min(interval, max(0.0, duration - (clock() - start_s))))
        readings.append(read())
    sample = traffic_between(readings)
    if sample.profile.prompt is None and sample.profile.output is None:
        raise CannotRun(
            "no request finished while the metrics were read, or the server counts none",
            value=f"{sample.duration_s:.0f} s of {url}",
            fix="a longer --duration, at an hour with traffic",
        )
    return sample
