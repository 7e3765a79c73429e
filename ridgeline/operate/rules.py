"""Prometheus rules for a server: goodput per SLO class, and the causes that lower it.

The causes are those of the rule book (`ridgeline.diagnose`) that the server's metrics show, and
what only a server in operation can have: no scrapes, a stalled engine, lost streams.

Behind Ridgeline the SLI is goodput: requests that met every objective of their class, over all.
Other servers have only histograms: there, a quantile of each latency is compared with its
objective. Annotations hold no values, so that the rules can be tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ridgeline.diagnose import alert_rules
from ridgeline.errors import BadInput
from ridgeline.operate.burn_rates import BURN_RATES, WINDOWS, BurnRate, error_budget
from ridgeline.operate.server_series import SERVERS, ServerName, ServerSeries
from ridgeline.records import Slo

Rule = dict[str, Any]
ERROR_RATIO = "ridgeline:slo_error_ratio:rate{window}"


def build_rules(
    server: ServerName, classes: Mapping[str, Slo], min_requests: int = 20
) -> dict[str, Any]:
    """The content of a rules file. `min_requests`: with fewer in its long window, an alert on the
    burn rate stays silent. Raises BadInput."""
    series = SERVERS[server]
    if not classes:
        raise BadInput("rules need SLOs", fix="add --slo-classes 'chat=ttft:500 tpot:50'")
    if series.requests is None and len(classes) > 1:
        raise BadInput(
            f"{series.title} does not tell requests of different classes apart",
            value=", ".join(classes),
            fix="give one class, which then applies to all requests",
        )
    groups: list[dict[str, Any]] = []
    if series.requests is not None:
        groups.append({"name": "ridgeline-slo-ratios", "rules": list(_ratios(series))})
        burning = [
            _burn_alert(series, name, error_budget(name, slo), rate, min_requests)
            for name, slo in classes.items()
            for rate in BURN_RATES
        ]
        groups.append({"name": "ridgeline-slo-burn", "rules": burning})
    else:
        name, slo = next(iter(classes.items()))
        groups.append(
            {"name": f"{server}-slo-latency", "rules": list(_latency_alerts(series, name, slo))}
        )
    groups.append({"name": f"{server}-operation", "rules": list(_operation(series, classes))})
    causes = alert_rules(server, strictest(classes)).rules
    groups.append({"name": f"{server}-causes", "rules": [rule.prometheus for rule in causes]})
    if server == "ridgeline":
        groups.append({"name": "ridgeline-fleet", "rules": _fleet_alerts()})
    return {"groups": groups}


def strictest(classes: Mapping[str, Slo]) -> Slo:
    """The least limit on TTFT and on TPOT that any class has."""
    ttfts = [slo.ttft_s for slo in classes.values() if slo.ttft_s is not None]
    tpots = [slo.tpot_s for slo in classes.values() if slo.tpot_s is not None]
    return Slo(ttft_s=min(ttfts, default=None), tpot_s=min(tpots, default=None))


def _ratios(series: ServerSeries) -> Iterator[Rule]:
    for window in WINDOWS:
        met = f"sum by (slo_class) (rate({series.met}[{window}]))"
        every = f"sum by (slo_class) (rate({series.requests}[{window}]))"
        yield {"record": ERROR_RATIO.format(window=window), "expr": f"1 - {met} / {every}"}


def _burn_alert(
    series: ServerSeries, name: str, budget: float, rate: BurnRate, min_requests: int
) -> Rule:
    limit = f"{rate.factor * budget:.6g}"
    label = f'{{slo_class="{name}"}}'
    parts = [
        f"{ERROR_RATIO.format(window=window)}{label} > {limit}"
        for window in (rate.long, rate.short)
    ]
    parts.append(
        f"sum by (slo_class) (increase({series.requests}{label}[{rate.long}])) >= {min_requests}"
    )
    days = 30 / rate.factor
    return _alert(
        "SloBudgetBurns",
        " and ".join(parts),
        rate.severity,
        f"Requests of class {name} miss their SLO: a budget of 30 days would last {days:.3g} days.",
        slo_class=name,
        window=rate.long,
    )


def _latency_alerts(series: ServerSeries, name: str, slo: Slo) -> Iterator[Rule]:
    objectives = (
        ("ttft", series.ttft, slo.ttft_s),
        ("tpot", series.tpot, slo.tpot_s),
        ("e2e", series.e2e, slo.e2e_s),
    )
    for what, histogram, limit_s in objectives:
        if limit_s is None:
            continue
        if histogram is None:
            raise BadInput(f"{series.title} does not measure {what}", value=name)
        quantiles = [
            f"histogram_quantile({slo.attainment:g}, sum by (le) "
            f"(rate({histogram}_bucket[{window}]))) > {limit_s:g}"
            for window in ("1h", "5m")
        ]
        yield _alert(
            "SloLatency",
            " and ".join(quantiles),
            "page",
            f"More requests than class {name} allows exceed its {what} of {limit_s:g} s.",
            slo_class=name,
            objective=what,
        )


def _operation(series: ServerSeries, classes: Mapping[str, Slo]) -> Iterator[Rule]:
    yield _alert(
        "ServerAbsent",
        f"absent({series.alive})",
        "page",
        f"No {series.title} server is scraped: every other alert is blind.",
        wait="5m",
    )
    ttft_s = strictest(classes).ttft_s
    if series.queue_age is not None and ttft_s is not None:
        yield _alert(
            "QueueOlderThanSlo",
            f"{series.queue_age} > {ttft_s:g}",
            "ticket",
            "The oldest queued request has waited longer than the strictest TTFT SLO allows.",
            wait="2m",
        )
    if series.prefix_hits is not None and series.prefix_queries is not None:
        hits, queries = series.prefix_hits, series.prefix_queries
        ratio = f"sum(rate({hits}[1h])) / sum(rate({queries}[1h]))"
        earlier = f"sum(rate({hits}[1h] offset 1d)) / sum(rate({queries}[1h] offset 1d))"
        yield _alert(
            "PrefixHitsHalved",
            f"{ratio} < 0.5 * ({earlier}) and {earlier} > 0.1",
            "ticket",
            "Half as many prompt tokens come from the prefix cache as a day ago.",
            wait="30m",
        )
    if series.title == "Ridgeline":
        yield _alert(
            "EngineStalled",
            "ridgeline_engine_stalled_seconds > 60 or ridgeline_engine_alive == 0",
            "page",
            "The engine makes no progress.",
            wait="1m",
        )


def _fleet_alerts() -> list[Rule]:
    return [
        _alert(
            "StreamsLost",
            "increase(ridgeline_fleet_lost_total[10m]) > 0",
            "page",
            "Streams ended in an error because no backend could continue them.",
        ),
        _alert(
            "BackendsCrash",
            "60 * rate(ridgeline_fleet_resumed_total[5m]) > 1",
            "ticket",
            "More than one stream a minute is continued for a backend that failed.",
        ),
        _alert(
            "NoBackendReady",
            'ridgeline_fleet_backends{state="ready"} == 0',
            "page",
            "The gateway has no backend that is ready.",
            wait="30s",
        ),
    ]


def _alert(
    name: str, expression: str, severity: str, summary: str, wait: str = "", **labels: str
) -> Rule:
    return {
        "alert": name,
        "expr": expression,
        **({"for": wait} if wait else {}),
        "labels": {"severity": severity, **labels},
        "annotations": {"summary": summary},
    }
