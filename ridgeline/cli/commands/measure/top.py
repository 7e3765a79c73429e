"""`ridgeline top`: a server's /metrics as figures for people, once or as they change.

Latencies are quantiles of histograms, interpolated within a bucket: of the last minute while it
watches, of everything since the server's start with `--once`. Rates are of the last interval. A
figure that the server does not tell is absent, never zero.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.top import NUM_SHOWN, Served, Shown, table
from ridgeline.config.tools import TopOptions
from ridgeline.errors import BadInput, RidgelineError
from ridgeline.measure.client.http_target import authorization, base_url, no_server_error
from ridgeline.report.json_line import json_line

WINDOW_S = 60.0
Buckets = dict[float, float]
"""Upper edge → how many observations are at most that."""


class Reading(msgspec.Struct, frozen=True):
    """One look at a server: values by name (summed over labels), histograms by stem."""

    at_s: float
    values: dict[str, float]
    buckets: dict[str, Buckets]


def read_page(text: str, at_s: float) -> Reading:
    """A Prometheus page; BadInput where it is none."""
    values: dict[str, float] = {}
    buckets: dict[str, Buckets] = {}
    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except ValueError as error:
        raise BadInput(f"the server's /metrics is not Prometheus text: {error}") from None
    for sample in samples:
        values[sample.name] = values.get(sample.name, 0.0) + sample.value
        if sample.name.endswith("_bucket"):
            edges = buckets.setdefault(sample.name.removesuffix("_bucket"), {})
            edge = float(sample.labels["le"])
            edges[edge] = edges.get(edge, 0.0) + sample.value
    return Reading(at_s, values, buckets)


def quantile(now: Buckets, before: Buckets, share: float) -> float | None:
    """Of the observations between two readings; None without any."""
    counts = [(edge, n - before.get(edge, 0.0)) for edge, n in sorted(now.items())]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    low = below = 0.0
    for edge, up_to in counts:
        if up_to >= share * total:
            if math.isinf(edge):
                return low
            return low + (edge - low) * (share * total - below) / max(up_to - below, 1e-9)
        low, below = edge, up_to
    return low


def figures(now: Reading, last: Reading | None, old: Reading | None) -> dict[str, float]:
    """What is worth knowing. `last`: the reading before (rates); `old`: that from which latencies
    and hits count (None: since the server's start)."""
    found = {name: now.values.get(key, math.nan) for name, key in _LEVELS.items()}
    found = {name: value for name, value in found.items() if math.isfinite(value)}
    for name, key in _RATES.items():
        if last is not None and key in now.values and now.at_s > last.at_s:
            grown = now.values[key] - last.values.get(key, 0.0)
            found[name] = max(0.0, grown) / (now.at_s - last.at_s)
    queried, hit = (_growth(now, old, f"vllm:prefix_cache_{n}_total") for n in ("queries", "hits"))
    if queried > 0:
        found["hit_share"] = hit / queried
    for name, stem in _LATENCIES.items():
        before = old.buckets.get(stem, {}) if old is not None else {}
        for share in (50, 95):
            value = quantile(now.buckets.get(stem, {}), before, share / 100)
            if value is not None:
                found[f"{name}_p{share}_s"] = value
    return found


def top(call: Invocation) -> int:
    """`ridgeline top`."""
    options = call.read(TopOptions)
    return command(
        options.url,
        options.api_key,
        once=options.once,
        json=options.json,
        interval_s=options.interval,
    )


def command(url: str, api_key: str | None, *, once: bool, json: bool, interval_s: float) -> int:
    """Look once, or until Ctrl-C."""
    base, headers = base_url(url), authorization(api_key)
    with httpx.Client(base_url=base, headers=headers, timeout=10) as client:
        look = partial(look_at, client)
        if once:
            tell_once(look, served_at(client), json=json, interval_s=interval_s)
        else:
            watch(look, look(), served_at(client), interval_s)
    return 0


def tell_once(
    look: Callable[[], Reading], served: Served, *, json: bool, interval_s: float
) -> None:
    """Two looks, for the rates; then the figures, as a table or as JSON."""
    first = look()
    time.sleep(interval_s)
    told = figures(look(), first, None)
    if json:
        print(json_line(told))
    else:
        Console().print(table(Shown(told=told, span="since the server's start", served=served)))


def watch(look: Callable[[], Reading], first: Reading, served: Served, interval_s: float) -> None:
    """A table that keeps up until Ctrl-C. A server that is away for a while is waited for."""
    kept, trends = deque([first]), Trends()
    try:
        with Live(table(Shown(told={}, served=served)), auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                try:
                    kept.append(look())
                except RidgelineError as error:
                    live.console.print(str(error), style="red", markup=False)
                    continue
                while len(kept) > 2 and kept[-1].at_s - kept[0].at_s > WINDOW_S:
                    kept.popleft()
                told = figures(kept[-1], kept[-2], kept[0])
                trends.add(told)
                shown = Shown(
                    told=told, span="of the last minute", trends=trends.by_name, served=served
                )
                live.update(table(shown), refresh=True)
    except KeyboardInterrupt:
        return


class Trends:
    """The latest values of every figure, one per look; None where a look did not know it."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[float | None]] = {}
        self._num_looks = 0

    def add(self, told: Mapping[str, float]) -> None:
        for name in told:
            self.by_name.setdefault(name, [None] * min(self._num_looks, NUM_SHOWN))
        for name, values in self.by_name.items():
            values.append(told.get(name))
            del values[:-NUM_SHOWN]
        self._num_looks += 1


def served_at(client: httpx.Client) -> Served:
    """What a server of ours says of itself; nothing of another's."""
    try:
        reply = client.get("/ridgeline/config")
        told = reply.json() if reply.status_code == 200 else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return Served()
    promise = told.get("slo") or {}
    pairs = (("ttft_p95_s", promise.get("ttft_s")), ("itl_p95_s", promise.get("tpot_s")))
    limits = {name: limit for name, limit in pairs if limit is not None}
    return Served(str(told.get("served_model_name") or ""), limits)


def look_at(client: httpx.Client) -> Reading:
    """The server's page now; BadInput where there is none at this address."""
    url = str(client.base_url)
    try:
        reply = client.get("/metrics")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise no_server_error(url, error) from None
    if reply.status_code != 200:
        raise no_server_error(url, f"/metrics says {reply.status_code}")
    return read_page(reply.text, time.monotonic())


def _growth(now: Reading, old: Reading | None, key: str) -> float:
    return now.values.get(key, 0.0) - (old.values.get(key, 0.0) if old is not None else 0.0)


_LEVELS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_used_share": "vllm:kv_cache_usage_perc",
    "preemptions": "vllm:num_preemptions_total",
    "finished": "vllm:request_success_total",
    "batch_lines_running": "ridgeline_batch_lines_running",
    "batch_lines_open": "ridgeline_batch_lines_open",
    "fill_share": "ridgeline_batch_fill_ratio",
    "cost_per_million": "ridgeline_cost_per_million_tokens",
}
_RATES = {
    "output_tok_s": "vllm:generation_tokens_total",
    "prompt_tok_s": "vllm:prompt_tokens_total",
    "batch_tok_s": "ridgeline_batch_tokens_total",
}
_LATENCIES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}
