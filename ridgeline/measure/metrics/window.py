"""The part of a run that counts: without its warm-up and its cool-down, and without a bias.

A server that fills up (ramp) or empties (drain) is not the server in its steady state. Which
requests belong to the window is decided by their *scheduled arrival* alone. Choosing by completion,
or dropping what spans an edge, would prefer short requests, and the bias changes its sign with the
load. A request that arrived in the window counts with its whole latency, however late it ended.

Rates are another matter: after overload, the requests of a window are served behind it. So rates
count what *happened* in the window: each token and each completion by its own instant, whatever
request it belongs to.
"""

from __future__ import annotations

import msgspec

from ridgeline.errors import BadInput
from ridgeline.measure.metrics.latency import succeeded
from ridgeline.records import RequestTrace, RunTrace


class Window(msgspec.Struct, frozen=True):
    """From `begin_s` up to, not including, `end_s`: seconds since the run's start."""

    begin_s: float
    end_s: float

    @property
    def width_s(self) -> float:
        return self.end_s - self.begin_s

    def __contains__(self, at_s: float) -> bool:
        return self.begin_s <= at_s < self.end_s


def window_of(run: RunTrace, warmup_s: float, cooldown_s: float) -> Window | None:
    """The window between `warmup_s` after the start and `cooldown_s` before the last arrival.

    None where nothing is to be trimmed. BadInput where nothing would be left.
    """
    if warmup_s == 0 and cooldown_s == 0:
        return None
    if warmup_s < 0 or cooldown_s < 0:
        raise BadInput("warm-up and cool-down cannot be negative", value=min(warmup_s, cooldown_s))
    last_s = max((request.scheduled_s for request in run.requests), default=0.0)
    window = Window(warmup_s, last_s - cooldown_s)
    if not any(request.scheduled_s in window for request in run.requests):
        raise BadInput(
            "no request arrived between warm-up and cool-down",
            value=f"{warmup_s:g} s and {cooldown_s:g} s of {last_s:.3g} s",
            fix="make the run longer or trim less",
        )
    return window


def arrived_in(run: RunTrace, window: Window) -> RunTrace:
    """The run's requests that arrived in the window, for latencies and attainment."""
    chosen = tuple(r for r in run.requests if r.scheduled_s in window)
    steps = tuple(step for step in run.steps if step.at_s in window)
    return msgspec.structs.replace(run, requests=chosen, steps=steps, duration_s=window.width_s)


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """What passed through the server in a window."""

    completions: int
    output_tokens: int
    input_tokens: int


def flow(run: RunTrace, window: Window) -> Flow:
    """Of requests that succeeded: completions and tokens by instant, prompts by first token."""
    done = succeeded(run.requests)
    return Flow(
        completions=sum((r.finished_s or 0.0) in window for r in done),
        output_tokens=sum(_tokens_in(request, window) for request in done),
        input_tokens=sum(r.prompt_tokens for r in done if r.token_s and r.token_s[0] in window),
    )


def _tokens_in(request: RequestTrace, window: Window) -> int:
    pairs = zip(request.token_s, request.token_counts, strict=True)
    return sum(count for at_s, count in pairs if at_s in window)
