"""Engine steps, inferred from the instants at which clients saw tokens.

A batching engine hands out one token per running sequence and step. So the time between two tokens
of one answer, the *leader*, is the time of a step, and the tokens of other answers that came
meanwhile say who else was in it; a first token says that its prompt was computed by then. When the
leader's answer ends, another running one leads. That is enough to fit a step-time model and to
place a run's phases under the roofline; it is not a record of the engine: queue, blocks and
preemptions inside the server stay unknown, and a step's time holds all that passed until the next
one (planning, sending, the network).

Why by leader and not by volleys of tokens that come together: servers write the tokens of a step
one connection after the other, and a volley that falls apart would look like two very short steps.

A prompt may have been computed in chunks, beside other people's tokens. Where it is known when a
prompt began (`began`), its tokens are shared among the steps since then, by their time; else all
of them count for the step of its first token. Blind to: steps in which nobody got a token (they
add to the next one), servers that hold tokens back, several tokens per chunk (left out).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import msgspec

from ridgeline.records import RequestTrace, RunTrace, StepStat

LATE_SHARE = 0.25  # of the typical gap: by this much another answer's token of a step may be late
LEAST_CHUNK = 2  # tokens of a prompt in a step; one behind a cache would read as decoding

Began = Callable[[RequestTrace], float | None]
"""When the engine began with a request's prompt, on the run's clock; None: nobody says."""


class _Seen(msgspec.Struct, frozen=True):
    """Token `number` of a request, seen at `at_s`."""

    at_s: float
    request: int
    number: int


class _Span(msgspec.Struct, frozen=True):
    """One step: from when to when, as the leader saw it."""

    begin_s: float
    end_s: float

    @property
    def middle_s(self) -> float:
        return (self.begin_s + self.end_s) / 2


def seen_steps(
    run: RunTrace, *, cached_share: float = 0.0, began: Began | None = None
) -> tuple[StepStat, ...]:
    """The steps that explain a run; () where no request brought tokens one by one.

    `cached_share`: how much of the prompts a prefix cache gave, where no request says so itself.
    """
    requests = one_by_one(run)
    if cached_share and not any(request.cached_tokens for request in requests):
        requests = [_with_hits(request, cached_share) for request in requests]
    ordered = sorted(requests, key=lambda request: request.token_s[0])
    begins = [_begin(request, began) for request in ordered]
    spans, seen = _steps(ordered, begins)
    chunks = _chunks(ordered, begins, spans, seen)
    return tuple(
        _stat(i, span, tokens, chunks[i], ordered)
        for i, (span, tokens) in enumerate(zip(spans, seen, strict=True))
    )


def one_by_one(run: RunTrace) -> list[RequestTrace]:
    """The requests whose tokens came one by one: those from which steps can be told."""
    return [r for r in run.requests if r.token_s and set(r.token_counts) == {1}]


def _with_hits(request: RequestTrace, share: float) -> RequestTrace:
    return msgspec.structs.replace(request, cached_tokens=int(share * request.prompt_tokens))


def _begin(request: RequestTrace, began: Began | None) -> float | None:
    told = None if began is None else began(request)
    return None if told is None else min(max(told, request.sent_s), request.token_s[0])


def _steps(
    requests: Sequence[RequestTrace], begins: Sequence[float | None]
) -> tuple[list[_Span], list[Sequence[_Seen]]]:
    """The steps in which somebody got a token, and those tokens."""
    seen = sorted(
        (_Seen(at_s, i, n) for i, r in enumerate(requests) for n, at_s in enumerate(r.token_s)),
        key=lambda token: token.at_s,
    )
    instants = [token.at_s for token in seen]
    late_s = LATE_SHARE * _typical_gap_s(requests)
    first, spans = 0, list[_Span]()
    tokens: list[Sequence[_Seen]] = []
    for span in _spans(requests, begins):
        past = bisect_right(instants, span.end_s + late_s, lo=first)
        if past > first and span.end_s > span.begin_s:
            spans.append(span)
            tokens.append(seen[first:past])
        first = past
    return spans, tokens


def _typical_gap_s(requests: Sequence[RequestTrace]) -> float:
    gaps = [b - a for r in requests for a, b in zip(r.token_s, r.token_s[1:], strict=False)]
    return median(gaps) if gaps else 0.0


def _spans(requests: Sequence[RequestTrace], begins: Sequence[float | None]) -> Iterator[_Span]:
    """The steps as the leaders saw them, in order."""
    end_s, upcoming = -1.0, 0
    while True:
        while upcoming < len(requests) and requests[upcoming].token_s[0] <= end_s:
            upcoming += 1
        running = [r for r in requests[:upcoming] if r.token_s[-1] > end_s]
        if running:
            leader = max(running, key=lambda request: request.token_s[-1])
        elif upcoming < len(requests):
            leader, told = requests[upcoming], begins[upcoming]
            begin_s = max(end_s, leader.sent_s if told is None else told)
            end_s = leader.token_s[0]
            yield _Span(begin_s, end_s)
        else:
            return
        for a, b in zip(leader.token_s, leader.token_s[1:], strict=False):
            if (a + b) / 2 > end_s:
                yield _Span(max(a, end_s), b)
                end_s = b
        end_s = max(end_s, leader.token_s[-1])


Chunk = tuple[int, int]
"""(tokens of a prompt, tokens before them)."""


def _chunks(
    requests: Sequence[RequestTrace],
    begins: Sequence[float | None],
    spans: Sequence[_Span],
    seen: Sequence[Sequence[_Seen]],
) -> list[list[Chunk]]:
    """Of each step, the pieces of prompts that were computed in it."""
    found: list[list[Chunk]] = [[] for _ in spans]
    for last, tokens in enumerate(seen):
        for token in tokens:
            if token.number == 0:
                begin_s = begins[token.request]
                for i, chunk in _pieces(requests[token.request], begin_s, spans, last):
                    found[i].append(chunk)
    return found


def _pieces(
    request: RequestTrace, begin_s: float | None, spans: Sequence[_Span], last: int
) -> Iterator[tuple[int, Chunk]]:
    """A prompt over the steps from its begin to the one of its first token, `last`."""
    new = max(1, request.prompt_tokens - request.cached_tokens)
    done, first = request.prompt_tokens - new, last
    while begin_s is not None and first > 0 and spans[first - 1].middle_s > begin_s:
        first -= 1  # a prompt is in all of a step, or not in it
    times = [spans[i].end_s - spans[i].begin_s for i in range(first, last + 1)]
    whole_s, passed_s, given = sum(times), 0.0, 0
    for i, time_s in enumerate(times, first):
        passed_s += time_s
        due = new if i == last else round(new * passed_s / whole_s)
        if due - given >= LEAST_CHUNK or i == last:
            yield i, (due - given, done + given)
            given = due


def _stat(
    index: int,
    span: _Span,
    seen: Sequence[_Seen],
    chunks: Sequence[Chunk],
    requests: Sequence[RequestTrace],
) -> StepStat:
    numbers = {token.request: token.number for token in reversed(seen)}  # the first of each counts
    decoding = [
        (1, requests[i].prompt_tokens + number - 1) for i, number in numbers.items() if number
    ]
    shapes = (*decoding, *chunks)
    return StepStat(
        index=index,
        at_s=span.begin_s,
        plan_s=0.0,
        run_s=span.end_s - span.begin_s,
        shapes=shapes,
        num_sampled=len(numbers),
        num_running=len(shapes),
        num_waiting=0,
        used_blocks=0,
        num_blocks=0,
        max_num_seqs=0,
    )
