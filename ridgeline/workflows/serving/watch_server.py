"""Observe a running server through its /metrics: once, or repeatedly with trends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping

import httpx
import msgspec

from ridgeline.errors import BadInput, RidgelineError
from ridgeline.measure.client.http_target import (
    authorization,
    base_url,
    key_refused,
    no_server_error,
)
from ridgeline.records.progress import Caution, Observer, silent
from ridgeline.report.result import Result
from ridgeline.workflows.serving.server_figures import (
    MetricsSnapshot,
    parse_metrics,
    server_figures,
)

WINDOW_S = 60.0
TREND_LENGTH = 40
TIMEOUT_S = 10.0


class ServerView(Result, frozen=True, kw_only=True):
    """A server's figures by name, and the time `span` that latencies and hit rates cover.

    `trends`: the latest values of each figure, oldest first; None where one was unknown. `model`
    and `slo_limits_s` (by figure) are those of a Ridgeline server, empty for others.
    """

    figures: Mapping[str, float] = {}
    span: str = ""
    trends: Mapping[str, tuple[float | None, ...]] = {}
    model: str = ""
    slo_limits_s: Mapping[str, float] = {}

    def to_dict(self) -> dict[str, float]:
        """The figures by name."""
        return dict(self.figures)


def view_server(url: str, *, api_key: str | None = None, interval_s: float = 1.0) -> ServerView:
    """The server's figures since its start, with rates over `interval_s`.

    Raises BadInput if no server answers with metrics at the URL.
    """
    with _client(url, api_key) as client:
        identity = _identity(client)
        first = _snapshot(client)
        time.sleep(interval_s)
        figures = server_figures(_snapshot(client), first, None)
    return msgspec.structs.replace(identity, figures=figures, span="since the server's start")


def watch_server(
    url: str, *, api_key: str | None = None, interval_s: float = 1.0, observer: Observer = silent
) -> Iterator[ServerView]:
    """The server's figures of the last minute, every `interval_s`, without end.

    The first view has no figures yet. A server that stops answering is reported as a caution and
    tried again; one that does not answer at first raises BadInput.
    """
    with _client(url, api_key) as client:
        snapshots, trends = deque([_snapshot(client)]), FigureTrends()
        identity = _identity(client)
        yield identity
        while True:
            time.sleep(interval_s)
            try:
                snapshots.append(_snapshot(client))
            except RidgelineError as error:
                observer(Caution(text=str(error)))
                continue
            while len(snapshots) > 2 and snapshots[-1].at_s - snapshots[0].at_s > WINDOW_S:
                snapshots.popleft()
            figures = server_figures(snapshots[-1], snapshots[-2], snapshots[0])
            trends.add(figures)
            yield msgspec.structs.replace(
                identity, figures=figures, span="of the last minute", trends=trends.by_name()
            )


class FigureTrends:
    """The latest TREND_LENGTH values of every figure; None where a view did not have it."""

    def __init__(self) -> None:
        self._values: dict[str, list[float | None]] = {}
        self._num_views = 0

    def add(self, figures: Mapping[str, float]) -> None:
        for name in figures:
            self._values.setdefault(name, [None] * min(self._num_views, TREND_LENGTH))
        for name, values in self._values.items():
            values.append(figures.get(name))
            del values[:-TREND_LENGTH]
        self._num_views += 1

    def by_name(self) -> dict[str, tuple[float | None, ...]]:
        return {name: tuple(values) for name, values in self._values.items()}


def _client(url: str, api_key: str | None) -> httpx.Client:
    return httpx.Client(base_url=base_url(url), headers=authorization(api_key), timeout=TIMEOUT_S)


def _snapshot(client: httpx.Client) -> MetricsSnapshot:
    url = str(client.base_url)
    try:
        reply = client.get("/metrics")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise no_server_error(url, error) from None
    if reply.status_code in (401, 403):
        raise key_refused(url, reply.status_code, client.headers.get("authorization"))
    if reply.status_code != 200:
        raise no_server_error(url, f"/metrics responds with HTTP {reply.status_code}")
    snapshot = parse_metrics(reply.text, time.monotonic())
    if "ridgeline_fleet_backends" in snapshot.values:
        fix = f"ridgeline fleet top --url {url.rstrip('/')}"
        raise BadInput("a gateway answers there, which has no engine", value=url, fix=fix)
    return snapshot


def _identity(client: httpx.Client) -> ServerView:
    """Model and SLO limits of a Ridgeline server; an empty view of any other."""
    try:
        reply = client.get("/ridgeline/config")
        config = reply.json() if reply.status_code == 200 else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return ServerView()
    slo = config.get("slo") or {}
    limits = {"ttft_p95_s": slo.get("ttft_s"), "itl_p95_s": slo.get("tpot_s")}
    return ServerView(
        model=str(config.get("served_model_name") or ""),
        slo_limits_s={name: limit for name, limit in limits.items() if limit is not None},
    )
