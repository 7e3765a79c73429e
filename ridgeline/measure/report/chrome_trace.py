"""A run in the Chrome trace format, for chrome://tracing and ui.perfetto.dev.

Two processes: the client, with the wait, prefill and decoding of every request (requests that do
not overlap share a row), and the engine, with its steps, its planning, and counters of running and
waiting sequences and KV blocks. Times are microseconds since the run began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ridgeline.measure.metrics.latency import outcome
from ridgeline.records import RequestTrace, RunTrace, StepStat

CLIENT, ENGINE = 1, 2
Event = dict[str, object]


def chrome_trace(run: RunTrace) -> dict[str, object]:
    """The trace as plain values for JSON."""
    events = [_name(CLIENT, "requests"), *_requests(run.requests)]
    if run.steps:
        events += [_name(ENGINE, "engine"), *_steps(run.steps)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"target": run.target}}


def _name(process: int, name: str) -> Event:
    return {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}


def _requests(requests: tuple[RequestTrace, ...]) -> Iterator[Event]:
    rows: list[float] = []  # the time from which each row is free
    for request in sorted(requests, key=lambda request: request.scheduled_s):
        end_s = max(request.finished_s or request.sent_s, request.scheduled_s)
        row = next((i for i, free_s in enumerate(rows) if free_s <= request.scheduled_s), len(rows))
        rows[row : row + 1] = [end_s]
        yield from _request(request, row, end_s)


def _request(request: RequestTrace, row: int, end_s: float) -> Iterator[Event]:
    args = {
        "outcome": outcome(request),
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "output_tokens": request.output_tokens,
        "error": request.error or "",
    }
    yield _span(CLIENT, row, request.id, request.scheduled_s, end_s, args)
    started_s = request.started_s if request.started_s is not None else request.sent_s
    first_s = request.token_s[0] if request.token_s else end_s
    for name, begin, end in (
        ("client queue", request.scheduled_s, request.sent_s),
        ("queue", request.sent_s, started_s),
        ("prefill", started_s, first_s),
        ("decode", first_s, request.token_s[-1] if request.token_s else first_s),
    ):
        if end > begin:
            yield _span(CLIENT, row, name, begin, end, {})


def _steps(steps: tuple[StepStat, ...]) -> Iterator[Event]:
    for step in steps:
        begin_s = step.at_s + step.plan_s
        args = {"tokens": step.num_tokens, "runs": len(step.shapes), "sampled": step.num_sampled}
        yield _span(ENGINE, 0, "plan", step.at_s, begin_s, {})
        yield _span(ENGINE, 1, f"step {step.index}", begin_s, begin_s + step.run_s, args)
        values = {"running": step.num_running, "waiting": step.num_waiting}
        yield _counter("sequences", step.at_s, values)
        yield _counter("KV blocks", step.at_s, {"used": step.used_blocks})


def _span(
    process: int, row: int, name: str, begin_s: float, end_s: float, args: Mapping[str, object]
) -> Event:
    return {
        "ph": "X",
        "pid": process,
        "tid": row,
        "name": name,
        "ts": round(1e6 * begin_s, 3),
        "dur": round(1e6 * max(0.0, end_s - begin_s), 3),
        "args": args,
    }


def _counter(name: str, at_s: float, values: Mapping[str, int]) -> Event:
    return {"ph": "C", "pid": ENGINE, "name": name, "ts": round(1e6 * at_s, 3), "args": values}
