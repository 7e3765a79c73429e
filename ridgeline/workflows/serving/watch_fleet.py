"""Read a fleet's state from its gateway, once or repeatedly."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ridgeline.errors import CannotRun
from ridgeline.fleet.page.view import FleetView
from ridgeline.fleet.ray.scaling import read_gateway

__all__ = ["FleetView", "view_fleet", "watch_fleet"]


def view_fleet(url: str, api_key: str | None) -> FleetView:
    """What the gateway at `url` sees. Raises CannotRun if it does not answer."""
    view = read_gateway(url.rstrip("/"), api_key)
    if view is None:
        raise CannotRun(
            "no gateway answers with its fleet",
            value=url,
            fix="give the URL of `ridgeline route`, and its key in RIDGELINE_API_KEY",
        )
    return view


def watch_fleet(url: str, api_key: str | None, interval_s: float) -> Iterator[FleetView | None]:
    """The fleet now and every `interval_s`, without end; None while the gateway does not answer.

    Raises CannotRun if it does not answer at first.
    """
    view: FleetView | None = view_fleet(url, api_key)
    while True:
        yield view
        time.sleep(interval_s)
        view = read_gateway(url.rstrip("/"), api_key)
