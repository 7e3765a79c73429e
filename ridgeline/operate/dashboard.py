"""A Grafana dashboard as JSON: goodput first, then latencies, queue, cache and fleet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ridgeline.operate.server_series import SERVERS, ServerName, ServerSeries
from ridgeline.records import Slo

_SCHEMA_VERSION = 39
_WIDTH, _HEIGHT = 12, 8
Query = tuple[str, str]
"""Legend and expression."""


def build_dashboard(server: ServerName, classes: Mapping[str, Slo]) -> dict[str, Any]:
    """The dashboard of one kind of server. Every query names series of `SERVERS` alone."""
    series = SERVERS[server]
    panels = list(_panels(series, classes))
    if server == "ridgeline":
        panels += list(_fleet_panels())
    return {
        "uid": f"ridgeline-{server}",
        "title": f"{series.title}: latency, goodput and load",
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_place(panel, number) for number, panel in enumerate(panels)],
    }


def queries_of(dashboard: Mapping[str, Any]) -> list[str]:
    """Every expression of a dashboard."""
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def _panels(series: ServerSeries, classes: Mapping[str, Slo]) -> Iterator[dict[str, Any]]:
    if series.requests is not None:
        ratio = (
            f"sum by (slo_class) (rate({series.met}[5m])) / "
            f"sum by (slo_class) (rate({series.requests}[5m]))"
        )
        yield _panel("Goodput by SLO class", "percentunit", ("{{slo_class}}", ratio))
        budgets = [
            (
                name,
                f'1 - (1 - sum(increase({series.met}{{slo_class="{name}"}}[30d])) / '
                f'sum(increase({series.requests}{{slo_class="{name}"}}[30d]))) / '
                f"{1 - slo.attainment:.6g}",
            )
            for name, slo in classes.items()
            if slo.attainment < 1
        ]
        if budgets:
            yield _panel("Error budget left, of 30 days", "percentunit", *budgets)
        misses = f"sum by (slo_class, why) (rate({series.missed}[5m]))"
        yield _panel("Missed objectives", "reqps", ("{{slo_class}} {{why}}", misses))
    for title, histogram in (
        ("Time to first token", series.ttft),
        ("Time per output token", series.tpot),
        ("End to end", series.e2e),
    ):
        if histogram is not None:
            quantiles = [(f"p{round(q * 100)}", _quantile(histogram, q)) for q in (0.5, 0.95, 0.99)]
            yield _panel(title, "s", *quantiles)
    yield _panel(
        "Requests",
        "short",
        ("running", f"sum({series.running})"),
        ("waiting", f"sum({series.waiting})"),
    )
    if series.queue_age is not None:
        yield _panel("Oldest queued request", "s", ("age", f"max({series.queue_age})"))
        saturation = "max by (slo_class) (ridgeline_saturation_ratio)"
        yield _panel("Predicted TTFT over its SLO", "percentunit", ("{{slo_class}}", saturation))
    yield _panel("Output", "short", ("tokens/s", f"sum(rate({series.output_tokens}[5m]))"))
    if series.kv_usage is not None:
        yield _panel("KV cache in use", "percentunit", ("{{instance}}", series.kv_usage))
    if series.prefix_hits is not None:
        hits = f"sum(rate({series.prefix_hits}[5m])) / sum(rate({series.prefix_queries}[5m]))"
        yield _panel("Prefix hits", "percentunit", ("share of prompt tokens", hits))


def _fleet_panels() -> Iterator[dict[str, Any]]:
    yield _panel("Backends", "short", ("{{state}}", "ridgeline_fleet_backends"))
    yield _panel("Requests in flight", "short", ("{{backend}}", "ridgeline_fleet_in_flight"))
    yield _panel(
        "Failovers",
        "short",
        *[
            (name, f"rate(ridgeline_fleet_{name}_total[5m])")
            for name in ("resumed", "migrated", "retried", "lost", "denied")
        ],
    )
    yield _panel("Waiting for a backend", "short", ("parked", "ridgeline_fleet_parked"))


def _quantile(histogram: str, quantile: float) -> str:
    return f"histogram_quantile({quantile:g}, sum by (le) (rate({histogram}_bucket[5m])))"


def _panel(title: str, unit: str, *queries: Query) -> dict[str, Any]:
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "title": title,
        "type": "timeseries",
        "datasource": datasource,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "datasource": datasource, "expr": expr, "legendFormat": legend}
            for i, (legend, expr) in enumerate(queries)
        ],
    }


def _place(panel: dict[str, Any], number: int) -> dict[str, Any]:
    row, column = divmod(number, 24 // _WIDTH)
    place = {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
    return {"id": number + 1, "gridPos": place, **panel}
