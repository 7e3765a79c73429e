"""All figures of one run in one record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from ridgeline.measure.metrics.goodput import Goodput, Validity, goodput, output_ratio, validity_of
from ridgeline.measure.metrics.latency import (
    Distribution,
    client_queue_s,
    distribution,
    e2e_s,
    fluidity,
    itl_chunk_s,
    itl_s,
    outcome,
    pool_values,
    publish_s,
    queue_s,
    successful_requests,
    tpot_s,
    ttft_s,
    user_tok_s,
    visible_s,
)
from ridgeline.measure.metrics.step_metrics import Occupancy, occupancy
from ridgeline.measure.metrics.window import MeasurementWindow, trim_to_window, window_totals
from ridgeline.records import RequestTrace, RunTrace, Slo
from ridgeline.records.trace import CountedBy

Metric = Literal["ttft", "tpot", "itl", "e2e"]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run: latencies of successful requests, rates over the whole run.

    `ttft` and `e2e` count from the scheduled arrival, `*_from_send` from the send. `itl` is over
    all tokens, `itl_chunk` over all gaps between chunks, `tpot` has one value per request.
    `steady_output_tok_s` excludes ramp and drain. `visible`: until the first token that is not
    reasoning. `user_tok_s`: output tokens/s of one user. `fluidity`: share of a request's tokens
    that met their deadline under the SLO. `counted_by`: how many answers were counted by the
    server, by a tokenizer, and as one token per chunk.
    """

    num_requests: int
    num_ok: int
    num_failed: int
    num_cancelled: int
    num_timeout: int
    counted_by: dict[CountedBy, int]
    duration_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    request_rate: float
    input_tok_s: float
    output_tok_s: float
    steady_output_tok_s: float | None
    offered_rate: float | None
    sent_rate: float | None
    peak_concurrency: int
    tokens_per_chunk: float | None
    output_ratio: float | None
    ttft: Distribution | None
    ttft_from_send: Distribution | None
    visible: Distribution | None
    user_tok_s: Distribution | None
    fluidity: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    itl_chunk: Distribution | None
    e2e: Distribution | None
    e2e_from_send: Distribution | None
    queue: Distribution | None
    publish: Distribution | None
    client_queue: Distribution | None
    queue_age: QueueAge | None
    goodput: Goodput | None
    occupancy: Occupancy | None
    validity: Validity


def summarise(
    run: RunTrace, slo: Slo | None = None, window: MeasurementWindow | None = None
) -> Summary:
    """All figures of a run, or of a window of it; `goodput` needs an SLO."""
    if window is None:
        return _summary(run, slo)
    summary = _summary(trim_to_window(run, window), slo)
    totals = window_totals(run, window)
    return msgspec.structs.replace(
        summary,
        request_rate=_rate(totals.completions, window.width_s),
        input_tok_s=_rate(totals.input_tokens, window.width_s),
        output_tok_s=_rate(totals.output_tokens, window.width_s),
        peak_concurrency=peak_concurrency(run.requests),
    )


def _summary(run: RunTrace, slo: Slo | None) -> Summary:
    done = successful_requests(run.requests)
    ends = [outcome(request) for request in run.requests]
    input_tokens = sum(request.prompt_tokens for request in done)
    output_tokens = sum(request.output_tokens for request in done)
    return Summary(
        num_requests=len(ends),
        num_ok=ends.count("ok"),
        num_failed=ends.count("failed"),
        num_cancelled=ends.count("cancelled"),
        num_timeout=ends.count("timeout"),
        counted_by=dict(Counter(request.counted_by for request in done)),
        duration_s=run.duration_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(request.cached_tokens for request in done),
        request_rate=_rate(len(done), run.duration_s),
        input_tok_s=_rate(input_tokens, run.duration_s),
        output_tok_s=_rate(output_tokens, run.duration_s),
        steady_output_tok_s=steady_output_tok_s(run),
        offered_rate=_mean_rate([request.scheduled_s for request in run.requests]),
        sent_rate=_mean_rate([request.sent_s for request in run.requests]),
        peak_concurrency=peak_concurrency(run.requests),
        tokens_per_chunk=_tokens_per_chunk(done),
        output_ratio=output_ratio(run),
        **_latencies(done),
        user_tok_s=distribution(map(user_tok_s, done)),
        fluidity=_fluidity(done, slo),
        queue_age=queue_age(run.requests),
        goodput=goodput(run, slo) if slo is not None else None,
        occupancy=occupancy(run),
        validity=validity_of(run),
    )


def _latencies(done: list[RequestTrace]) -> dict[str, Distribution | None]:
    return {
        "ttft": distribution(map(ttft_s, done)),
        "ttft_from_send": distribution(ttft_s(request, "sent") for request in done),
        "visible": distribution(map(visible_s, done)),
        "tpot": distribution(map(tpot_s, done)),
        "itl": pool_values(done, itl_s),
        "itl_chunk": pool_values(done, itl_chunk_s),
        "e2e": distribution(map(e2e_s, done)),
        "e2e_from_send": distribution(e2e_s(request, "sent") for request in done),
        "queue": distribution(map(queue_s, done)),
        "publish": distribution(map(publish_s, done)),
        "client_queue": distribution(map(client_queue_s, done)),
    }


def _fluidity(done: list[RequestTrace], slo: Slo | None) -> Distribution | None:
    """Share of a request's tokens in time; None without limits on TTFT and TPOT."""
    if slo is None or slo.ttft_s is None or slo.tpot_s is None:
        return None
    first_s, next_s = slo.ttft_s, slo.tpot_s
    return distribution(fluidity(request, first_s, next_s) for request in done)


def _rate(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _mean_rate(times_s: list[float]) -> float | None:
    """Events per second between the first and the last; None for fewer than two times."""
    width_s = max(times_s) - min(times_s) if times_s else 0.0
    return (len(times_s) - 1) / width_s if width_s > 0 else None


def steady_output_tok_s(run: RunTrace) -> float | None:
    """Output tokens/s between the first completion and the last send, without ramp and drain.

    Each token counts by its own time, so that a request across an edge counts in part; leaving it
    out would bias the rate. None if the window is empty.
    """
    done = successful_requests(run.requests)
    ends = [request.token_s[-1] for request in done if request.token_s]
    if not ends:
        return None
    begin_s, end_s = min(ends), max(request.sent_s for request in run.requests)
    if end_s <= begin_s:
        return None
    inside = sum(
        count
        for request in done
        for at_s, count in zip(request.token_s, request.token_counts, strict=True)
        if begin_s < at_s <= end_s
    )
    return inside / (end_s - begin_s)


def peak_concurrency(requests: tuple[RequestTrace, ...]) -> int:
    """The largest number of requests in flight at once, from send to end."""
    changes = [(request.sent_s, 1) for request in requests]
    changes += [(request.finished_s, -1) for request in requests if request.finished_s is not None]
    in_flight = peak = 0
    for _, change in sorted(changes):
        in_flight += change
        peak = max(peak, in_flight)
    return peak


class QueueAge(msgspec.Struct, frozen=True, kw_only=True):
    """Age of the oldest request that has been sent and has not started.

    `mean_s`: over the time in which one waited. `max_s`: its peak. `waiting_share`: share of the
    time from the first send to the last start in which one waited.
    """

    mean_s: float
    max_s: float
    waiting_share: float


def queue_age(requests: Sequence[RequestTrace]) -> QueueAge | None:
    """The age of the queue; None if the server does not report when requests started."""
    waits = sorted(
        (request.sent_s, request.started_s)
        for request in requests
        if request.started_s is not None and request.started_s >= request.sent_s
    )
    if not waits:
        return None
    area = waiting_s = 0.0
    until_s = waits[0][0]  # up to here, an earlier request was the oldest
    for sent_s, started_s in waits:
        begin_s = max(until_s, sent_s)
        if started_s > begin_s:
            area += ((started_s - sent_s) ** 2 - (begin_s - sent_s) ** 2) / 2
            waiting_s += started_s - begin_s
            until_s = started_s
    span_s = max(end_s for _, end_s in waits) - waits[0][0]
    return QueueAge(
        mean_s=area / waiting_s if waiting_s else 0.0,
        max_s=max(end_s - sent_s for sent_s, end_s in waits),
        waiting_share=waiting_s / span_s if span_s > 0 else 0.0,
    )


def _tokens_per_chunk(done: list[RequestTrace]) -> float | None:
    chunks = sum(len(request.token_s) for request in done)
    return sum(sum(request.token_counts) for request in done) / chunks if chunks else None


def counting_warning(summary: Summary) -> str | None:
    """Why the token counts of a run are a lower bound; None if they are not."""
    guessed = summary.counted_by.get("chunks", 0)
    if not guessed:
        return None
    return (
        f"{guessed} answers have no token count of the server and are counted as one token per "
        "chunk, which is a lower bound; --tokenizer MODEL counts them"
    )


COUNTERS: dict[CountedBy, str] = {
    "server": "the server's usage",
    "tokenizer": "the tokenizer",
    "chunks": "one per chunk",
}


def describe_counting(summary: Summary) -> str:
    """Who counted the output tokens."""
    counted = summary.counted_by
    if len(counted) == 1:
        return COUNTERS[next(iter(counted))]
    return ", ".join(f"{count} answers by {COUNTERS[name]}" for name, count in counted.items())
