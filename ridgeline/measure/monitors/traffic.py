"""Reads the shape of a server's traffic from its /metrics: differences between readings."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise

import msgspec

from ridgeline.measure.monitors.server_metrics import identify_server, parse_page
from ridgeline.records.traffic import LengthProfile, TrafficProfile

_BUCKET = re.compile(r'^(\S+?)_bucket\{(?:.*,)?\s*le="([^"]+)"[^}]*\}\s+(\S+)', re.MULTILINE)
_INHERITS = {"ridgeline": "vllm"}


class TrafficReading(msgspec.Struct, frozen=True, kw_only=True):
    """One page of metrics at a time in seconds: `values` of counters and gauges, and cumulative
    `buckets` by upper bound, of histograms."""

    at_s: float
    server: str | None
    values: dict[str, float]
    buckets: dict[str, dict[float, float]]


@cache
def traffic_names() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Server → our name → its names."""
    text = files("ridgeline.measure.monitors").joinpath("traffic.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, dict[str, tuple[str, ...]]])


def read_page(page: str, at_s: float) -> TrafficReading:
    """The reading that a page of metrics is."""
    values = parse_page(page)
    buckets: dict[str, dict[float, float]] = {}
    for name, bound, value in _BUCKET.findall(page):
        row = buckets.setdefault(name, {})
        row[float(bound)] = row.get(float(bound), 0.0) + float(value)
    return TrafficReading(at_s=at_s, server=identify_server(values), values=values, buckets=buckets)


class TrafficSample(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic between the first and the last reading.

    `hits` and `queries`: prompt tokens found and looked up in the prefix cache, in each interval
    between two readings. `missing`: what the server does not report.
    """

    profile: TrafficProfile
    duration_s: float
    hits: tuple[float, ...]
    queries: tuple[float, ...]
    missing: tuple[str, ...]


def traffic_between(readings: Sequence[TrafficReading]) -> TrafficSample:
    """The traffic of a server between at least two readings.

    A counter that decreased (the server was restarted) is missing.
    """
    first, last = readings[0], readings[-1]
    server = last.server or ""
    names = traffic_names().get(_INHERITS.get(server, server), {})
    lengths = {part: _lengths(first, last, names, part) for part in ("prompt", "output")}
    requests = _difference(first, last, names.get("requests", ()))
    duration_s = last.at_s - first.at_s
    pairs = [
        (_difference(a, b, names.get("hits", ())), _difference(a, b, names.get("queries", ())))
        for a, b in pairwise(readings)
    ]
    known = [(hits, queries) for hits, queries in pairs if hits is not None and queries]
    queried = sum(queries for _, queries in known)
    shared = sum(hits for hits, _ in known) / queried if queried else None
    if shared is None:
        shared = _value(last, names.get("hit_share", ()))
    profile = TrafficProfile(
        num_requests=round(requests or 0),
        prompt=lengths["prompt"],
        output=lengths["output"],
        rate=None if requests is None else requests / duration_s,
        shared_share=shared,
    )
    named = {**lengths, "rate": requests, "prefix sharing": shared}
    return TrafficSample(
        profile=profile,
        duration_s=duration_s,
        hits=tuple(hits for hits, _ in known),
        queries=tuple(queries for _, queries in known),
        missing=tuple(name for name, value in named.items() if value is None),
    )


def _lengths(
    first: TrafficReading,
    last: TrafficReading,
    names: Mapping[str, tuple[str, ...]],
    part: str,
) -> LengthProfile | None:
    """From the histogram, else the mean from the counters of tokens and requests."""
    for name in names.get(part, ()):
        if name in last.buckets:
            profile = _histogram(first, last, name)
            if profile is not None:
                return profile
    tokens = _difference(first, last, names.get(f"{part}_total", ()))
    requests = _difference(first, last, names.get("requests", ()))
    return LengthProfile(mean=tokens / requests) if tokens and requests else None


def _histogram(first: TrafficReading, last: TrafficReading, name: str) -> LengthProfile | None:
    total = _difference(first, last, (f"{name}_count",))
    tokens = _difference(first, last, (f"{name}_sum",))
    if not total or tokens is None:
        return None
    before = first.buckets.get(name, {})
    bounds = sorted(last.buckets[name])
    cumulative = [last.buckets[name][bound] - before.get(bound, 0.0) for bound in bounds]
    counts = [b - a for a, b in zip((0.0, *cumulative), cumulative, strict=False)]
    finite = [bound for bound in bounds if bound != float("inf")]
    if len(finite) == len(bounds):
        counts.append(total - cumulative[-1])
    return LengthProfile(
        mean=tokens / total,
        bounds=tuple(finite),
        counts=tuple(max(0, round(count)) for count in counts),
    )


def _value(reading: TrafficReading, names: Sequence[str]) -> float | None:
    return next((reading.values[name] for name in names if name in reading.values), None)


def _difference(first: TrafficReading, last: TrafficReading, names: Sequence[str]) -> float | None:
    before, after = _value(first, names), _value(last, names)
    if after is None:
        return None
    change = after - (before or 0.0)
    return change if change >= 0 else None
