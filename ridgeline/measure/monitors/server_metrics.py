"""A server's /metrics, read periodically during a run, under one set of names.

Gauges are averaged and their 95th percentile kept; counters and histograms give the difference
between the first and the last reading, so that earlier requests do not count. Metrics that a server
does not report are absent, never zero. A counter that decreased (the server was restarted) is
absent, too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

import msgspec

from ridgeline.measure.client.http_connection import OK, HttpConnectionError, HttpConnectionPool
from ridgeline.measure.monitors.polling import PERIOD_S, Polling
from ridgeline.stats import percentile

GAUGES = ("running", "waiting", "kv_used_share", "hit_share", "slots", "rss_bytes")
COUNTERS = (
    "preemptions",
    "hit_tokens",
    "queried_tokens",
    "prompt_tokens",
    "output_tokens",
    "prefill_total_s",
    "decode_total_s",
    "num_steps",
    "step_tokens",
    "waiting_total_s",
    "full_waiting_total_s",
    "spent_waiting_total_s",
    "cpu_s",
)
TWIN = "ridgeline_twin"
"""Begins metrics of `ridgeline twin`, whose other metrics are those of the server it imitates."""
HISTOGRAMS = ("queue_s", "prefill_s", "decode_s")

Sample = Mapping[str, float]
"""Metric name → value, summed over its label sets."""


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its server reports it: `means` and `p95` of gauges, `counts` of counters.

    `mean_s`: means of histograms in seconds.
    """

    server: str
    num_readings: int
    means: dict[str, float]
    p95: dict[str, float]
    counts: dict[str, float]
    mean_s: dict[str, float]


@cache
def metric_names() -> dict[str, dict[str, tuple[str, ...]]]:
    """Server → our name → its names. `sign` is a tuple of one."""
    text = (
        files("ridgeline.measure.monitors")
        .joinpath("metric_names.toml")
        .read_text(encoding="utf-8")
    )
    tables = tomllib.loads(text)
    names = {}
    for server, table in tables.items():
        rows = {**tables.get(table.get("inherits", ""), {}), **table}
        rows.pop("inherits", None)
        names[server] = {
            name: (value,) if isinstance(value, str) else tuple(value)
            for name, value in rows.items()
        }
    return names


def parse_page(text: str) -> dict[str, float]:
    """Parse Prometheus' text format; values are summed over labels (replicas, ranks, models).

    Invalid lines are skipped.
    """
    sums: dict[str, float] = {}
    for line in text.split("\n"):
        if not line or line.startswith("#"):
            continue
        name, value = _line(line)
        if name and value is not None and value == value:
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _line(line: str) -> tuple[str, float | None]:
    name, brace, rest = line.partition("{")
    if brace:
        _, _, rest = rest.rpartition("}")
    else:
        name, _, rest = line.partition(" ")
    try:
        return name.strip(), float(rest.split()[0])
    except (ValueError, IndexError):
        return "", None


def identify_server(sample: Sample) -> str | None:
    """The server whose page this is, by the first matching sign; None if unknown."""
    for server, names in metric_names().items():
        sign = names["sign"][0]
        if any(name.startswith(sign) and not name.startswith(TWIN) for name in sample):
            return server
    return None


class ServerMonitor:
    """Reads /metrics while an `async with` block runs."""

    def __init__(self, pool: HttpConnectionPool, path: str, period_s: float = PERIOD_S) -> None:
        self._pool, self._path = pool, path
        self._samples: list[dict[str, float]] = []
        self._polling = Polling(self._read, period_s)

    async def __aenter__(self) -> ServerMonitor:
        await self._polling.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._polling.__aexit__(*exc)
        self._pool.close()

    async def begin(self) -> None:
        """Discard the readings of the warm-up and start again."""
        if self._samples:
            self._samples.clear()
            await self._read()

    def report(self) -> ServerReport | None:
        return make_report(self._samples)

    async def _read(self) -> bool:
        """Read once; False if there is no reading yet, which ends the polling."""
        try:
            reply = await self._pool.get(self._path)
        except HttpConnectionError:
            return bool(self._samples)
        if reply.status == OK:
            sample = parse_page(reply.body.decode("utf-8", "replace"))
            if sample:
                self._samples.append(sample)
        return bool(self._samples)


def make_report(samples: Sequence[Sample]) -> ServerReport | None:
    """The report of these readings; None without readings, or for an unknown server."""
    server = identify_server(samples[-1]) if samples else None
    if server is None:
        return None
    names = metric_names()[server]
    gauges = {name: _series(samples, names.get(name, ())) for name in GAUGES}
    known = {name: values for name, values in gauges.items() if values}
    counts = {name: _growth(samples, names.get(name, ())) for name in COUNTERS}
    means = {name: _mean_s(samples, names.get(name, ())) for name in HISTOGRAMS}
    return ServerReport(
        server=server,
        num_readings=len(samples),
        means={name: sum(values) / len(values) for name, values in known.items()},
        p95={name: percentile(values, 95) for name, values in known.items()},
        counts={name: value for name, value in counts.items() if value is not None},
        mean_s={name: value for name, value in means.items() if value is not None},
    )


def _series(samples: Sequence[Sample], names: Sequence[str]) -> list[float]:
    for name in names:
        parts = name.split(" + ")
        complete = [sample for sample in samples if all(part in sample for part in parts)]
        if complete:
            return [sum(sample[part] for part in parts) for sample in complete]
    return []


def _growth(samples: Sequence[Sample], names: Sequence[str]) -> float | None:
    values = _series(samples, names)
    if len(values) < 2 or values[-1] < values[0]:
        return None
    return values[-1] - values[0]


def _mean_s(samples: Sequence[Sample], stems: Sequence[str]) -> float | None:
    for stem in stems:
        total = _growth(samples, (f"{stem}_sum",))
        count = _growth(samples, (f"{stem}_count",))
        if total is not None and count:
            return total / count
    return None
