"""The part of a run between warm-up and cool-down, chosen without bias.

A server that fills up (ramp) or empties (drain) is not in its steady state. Requests belong to the
window by their *scheduled arrival* alone. Choosing by completion, or leaving out requests across an
edge, would prefer short requests, and the sign of the bias changes with the load. A request that
arrived in the window counts with its whole latency, however late it ended.

Rates count events in the window instead: each token and each completion by its own time, whichever
request it belongs to, because an overloaded server serves the requests of a window after it.
"""

from __future__ import annotations

import msgspec

from ridgeline.errors import BadInput
from ridgeline.measure.metrics.latency import successful_requests
from ridgeline.records import RequestTrace, RunTrace
from ridgeline.report.numbers import rounded


class MeasurementWindow(msgspec.Struct, frozen=True):
    """The interval [begin_s, end_s) in seconds since the start of the run."""

    begin_s: float
    end_s: float

    @property
    def width_s(self) -> float:
        return self.end_s - self.begin_s

    def __contains__(self, at_s: float) -> bool:
        return self.begin_s <= at_s < self.end_s


def window_of(run: RunTrace, warmup_s: float, cooldown_s: float) -> MeasurementWindow | None:
    """The window between `warmup_s` after the start and `cooldown_s` before the last arrival.

    None if nothing is trimmed. Raises BadInput if no request would be left.
    """
    if warmup_s == 0 and cooldown_s == 0:
        return None
    if warmup_s < 0 or cooldown_s < 0:
        raise BadInput(
            "warm-up and cool-down must not be negative", value=min(warmup_s, cooldown_s)
        )
    last_s = max((request.scheduled_s for request in run.requests), default=0.0)
    window = MeasurementWindow(warmup_s, last_s - cooldown_s)
    if not any(request.scheduled_s in window for request in run.requests):
        raise BadInput(
            "no request arrived between warm-up and cool-down",
            value=f"{warmup_s:g} s and {cooldown_s:g} s of {rounded(last_s)} s",
            fix="make the run longer or trim less",
        )
    return window


def trim_to_window(run: RunTrace, window: MeasurementWindow) -> RunTrace:
    """The run with only the requests that arrived in the window, for latencies and attainment."""
    chosen = tuple(r for r in run.requests if r.scheduled_s in window)
    steps = tuple(step for step in run.steps if step.at_s in window)
    return msgspec.structs.replace(run, requests=chosen, steps=steps, duration_s=window.width_s)


class WindowTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Completed requests and tokens in a window."""

    completions: int
    output_tokens: int
    input_tokens: int


def window_totals(run: RunTrace, window: MeasurementWindow) -> WindowTotals:
    """Totals of successful requests; their prompts count at the first token."""
    done = successful_requests(run.requests)
    return WindowTotals(
        completions=sum((r.finished_s or 0.0) in window for r in done),
        output_tokens=sum(_tokens_in(request, window) for request in done),
        input_tokens=sum(r.prompt_tokens for r in done if r.token_s and r.token_s[0] in window),
    )


def _tokens_in(request: RequestTrace, window: MeasurementWindow) -> int:
    pairs = zip(request.token_s, request.token_counts, strict=True)
    return sum(count for at_s, count in pairs if at_s in window)
