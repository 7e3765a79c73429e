"""Engine steps, inferred from the instants at which clients saw tokens.

A batching engine hands out one token per running sequence and step, so tokens of different
requests that arrive together left in one step, and the time between two such volleys is the time
of a step. A request's first token says that its prompt was computed in the interval before. That
is enough to fit a step-time model for the simulator; it is not a record of the engine, so it is
shown to nobody: queue, blocks and preemptions inside the server stay unknown.

Blind to: steps without any token (an unfinished chunk of a prompt adds to the next volley), servers
that hold tokens back, several tokens per chunk (left out).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ridgeline.records import RequestTrace, RunTrace, StepStat
from ridgeline.settings import Settings

APART_S = 0.001  # tokens nearer than this may be of one step
PER_GAP = 0.25  # or nearer than this share of the typical gap between a request's tokens


class _Arrival(msgspec.Struct, frozen=True):
    """Token `number` of a request, seen at `at_s`."""

    at_s: float
    request: int
    number: int


def infer_steps(run: RunTrace, settings: Settings) -> tuple[StepStat, ...]:
    """The steps that explain a run; () where no request brought tokens one by one.

    Where prompts may have come from a prefix cache and the server does not say how much of them
    did, only steps without a prompt count: the others' work is not known.
    """
    hits_told = any(request.cached_tokens for request in run.requests)
    known = hits_told or not settings.enable_prefix_caching
    steps = _all_steps(run)
    return tuple(s for s in steps if s.run_s > 0 and (known or s.num_tokens == s.num_running))


def _all_steps(run: RunTrace) -> list[StepStat]:
    requests = [r for r in run.requests if r.token_s and set(r.token_counts) == {1}]
    volleys = _volleys(requests)
    steps = []
    for index, (before, volley) in enumerate(zip([None, *volleys], volleys, strict=False)):
        began_s = _began_s(before, volley, requests)
        steps.append(_step(index, began_s, volley, requests))
    return steps


def _volleys(requests: Sequence[RequestTrace]) -> list[list[_Arrival]]:
    """Arrivals in groups: near in time, and no request twice."""
    gaps = sorted(b - a for r in requests for a, b in zip(r.token_s, r.token_s[1:], strict=False))
    apart_s = max(APART_S, PER_GAP * gaps[len(gaps) // 2]) if gaps else APART_S
    arrivals = sorted(
        (_Arrival(at_s, i, n) for i, r in enumerate(requests) for n, at_s in enumerate(r.token_s)),
        key=lambda arrival: arrival.at_s,
    )
    volleys: list[list[_Arrival]] = []
    for arrival in arrivals:
        last = volleys[-1] if volleys else []
        near = last and arrival.at_s - last[-1].at_s < apart_s
        if near and all(other.request != arrival.request for other in last):
            last.append(arrival)
        else:
            volleys.append([arrival])
    return volleys


def _began_s(
    before: list[_Arrival] | None, volley: list[_Arrival], requests: Sequence[RequestTrace]
) -> float:
    """When the step began: with the end of the one before, unless the server was idle then."""
    sent_s = min(requests[each.request].sent_s for each in volley)
    return sent_s if before is None else max(before[-1].at_s, sent_s)


def _step(
    index: int, began_s: float, volley: list[_Arrival], requests: Sequence[RequestTrace]
) -> StepStat:
    shapes = []
    for each in volley:
        request = requests[each.request]
        if each.number:
            shapes.append((1, request.prompt_tokens + each.number - 1))
        else:
            new = max(1, request.prompt_tokens - request.cached_tokens)
            shapes.append((new, request.prompt_tokens - new))
    return StepStat(
        index=index,
        at_s=began_s,
        plan_s=0.0,
        run_s=volley[-1].at_s - began_s,
        shapes=tuple(shapes),
        num_sampled=len(shapes),
        num_running=len(shapes),
        num_waiting=0,
        used_blocks=0,
        num_blocks=0,
        max_num_seqs=0,
    )
