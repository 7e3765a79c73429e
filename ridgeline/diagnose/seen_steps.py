"""Engine steps, inferred from the instants at which clients saw tokens.

A batching engine hands out one token per running sequence and step. So the time between two tokens
of one answer, the *leader*, is the time of a step, and the tokens of other answers that came
meanwhile say who else was in it; a first token says that its prompt was computed in it. When the
leader's answer ends, another running one leads. That is enough to fit a step-time model for the
simulator; it is not a record of the engine, so it is shown to nobody: queue, blocks and preemptions
inside the server stay unknown.

Why by leader and not by volleys of tokens that come together: servers write the tokens of a step
one connection after the other, and a volley that falls apart would look like two very short steps.

Blind to: steps without any token (an unfinished chunk of a prompt adds to the next step), servers
that hold tokens back, several tokens per chunk (left out).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from ridgeline.records import RequestTrace, RunTrace, StepStat
from ridgeline.settings import Settings

LATE_SHARE = 0.25  # of the typical gap: by this much another answer's token of a step may be late


class _Seen(msgspec.Struct, frozen=True):
    """Token `number` of a request, seen at `at_s`."""

    at_s: float
    request: int
    number: int


class _Span(msgspec.Struct, frozen=True):
    """One step: from when to when, as the leader saw it."""

    begin_s: float
    end_s: float


def infer_steps(
    run: RunTrace, settings: Settings, *, shared_share: float = 0.0
) -> tuple[StepStat, ...]:
    """The steps that explain a run; () where no request brought tokens one by one.

    Where prompts may have come from a prefix cache and the server does not say how much of them
    did, it is taken to be `shared_share`: the share of the workload's prompts that repeats.
    """
    requests = [r for r in run.requests if r.token_s and set(r.token_counts) == {1}]
    told = any(request.cached_tokens for request in requests)
    if settings.enable_prefix_caching and not told:
        requests = [_with_hits(request, shared_share) for request in requests]
    return tuple(_steps(sorted(requests, key=lambda request: request.token_s[0])))


def _with_hits(request: RequestTrace, share: float) -> RequestTrace:
    return msgspec.structs.replace(request, cached_tokens=int(share * request.prompt_tokens))


def _steps(requests: Sequence[RequestTrace]) -> Iterator[StepStat]:
    seen = sorted(
        (_Seen(at_s, i, n) for i, r in enumerate(requests) for n, at_s in enumerate(r.token_s)),
        key=lambda token: token.at_s,
    )
    instants = [token.at_s for token in seen]
    late_s = LATE_SHARE * _typical_gap_s(requests)
    first = 0
    for index, span in enumerate(_spans(requests)):
        past = bisect_right(instants, span.end_s + late_s, lo=first)
        if past > first and span.end_s > span.begin_s:
            yield _step(index, span, seen[first:past], requests)
        first = past


def _typical_gap_s(requests: Sequence[RequestTrace]) -> float:
    gaps = [b - a for r in requests for a, b in zip(r.token_s, r.token_s[1:], strict=False)]
    return median(gaps) if gaps else 0.0


def _spans(requests: Sequence[RequestTrace]) -> Iterator[_Span]:
    """The steps as the leaders saw them, in order."""
    end_s, upcoming = -1.0, 0
    while True:
        while upcoming < len(requests) and requests[upcoming].token_s[0] <= end_s:
            upcoming += 1
        running = [r for r in requests[:upcoming] if r.token_s[-1] > end_s]
        if running:
            leader = max(running, key=lambda request: request.token_s[-1])
        elif upcoming < len(requests):
            leader = requests[upcoming]
            begin_s, end_s = max(end_s, leader.sent_s), leader.token_s[0]
            yield _Span(begin_s, end_s)
        else:
            return
        for a, b in zip(leader.token_s, leader.token_s[1:], strict=False):
            if (a + b) / 2 > end_s:
                yield _Span(max(a, end_s), b)
                end_s = b
        end_s = max(end_s, leader.token_s[-1])


def _step(
    index: int, span: _Span, seen: Sequence[_Seen], requests: Sequence[RequestTrace]
) -> StepStat:
    numbers = {token.request: token.number for token in reversed(seen)}  # the first of each counts
    shapes = []
    for i, number in numbers.items():
        request = requests[i]
        if number:
            shapes.append((1, request.prompt_tokens + number - 1))
        else:
            new = max(1, request.prompt_tokens - request.cached_tokens)
            shapes.append((new, request.prompt_tokens - new))
    return StepStat(
        index=index,
        at_s=span.begin_s,
        plan_s=0.0,
        run_s=span.end_s - span.begin_s,
        shapes=tuple(shapes),
        num_sampled=len(shapes),
        num_running=len(shapes),
        num_waiting=0,
        used_blocks=0,
        num_blocks=0,
        max_num_seqs=0,
    )
