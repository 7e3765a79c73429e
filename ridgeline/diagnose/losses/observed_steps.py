"""Infer engine steps from the times at which clients received tokens.

A batching engine emits one token per running sequence and step. The time between two tokens of one
response, the *leader*, is therefore the time of a step, and tokens of other responses that arrive
in between show which requests shared the step; a first token shows that its prompt had been
computed. When the leader finishes, another running response takes over. This is enough to fit a
step-time model and to place the phases of a run under the roofline. It is not a record of the
engine: the server's queue, blocks and preemptions stay unknown, and a step's time includes
everything up to the next step (planning, sending, the network).

Steps are not inferred from bursts of tokens, because servers write the tokens of a step to one
connection after another; a burst that is split would look like two very short steps.

A prompt may have been computed in chunks, together with the tokens of other requests. If the start
of its prefill is known (`began`), its tokens are divided among the steps since then in proportion
to their time; otherwise all of them count for the step of the first token. Limitations: a step
without any token is added to the next one, servers that delay tokens mislead it, and requests with
several tokens per chunk are left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import msgspec

from ridgeline.records import RequestTrace, RunTrace, StepStat

LATE_SHARE = 0.25  # of the typical gap: how late another response's token of the same step may be
LEAST_CHUNK = (
    2  # prompt tokens in a step; a single one after cached tokens would look like decoding
)

PrefillStart = Callable[[RequestTrace], float | None]
"""When the prefill of a request started, on the run's clock; None if unknown."""


class _SeenToken(msgspec.Struct, frozen=True):
    """Token `number` of a request, received at `at_s`."""

    at_s: float
    request: int
    number: int


class _Span(msgspec.Struct, frozen=True):
    """The time of one step, between two tokens of the leader."""

    begin_s: float
    end_s: float

    @property
    def middle_s(self) -> float:
        return (self.begin_s + self.end_s) / 2


def infer_steps_from_tokens(
    run: RunTrace, *, cached_share: float = 0.0, began: PrefillStart | None = None
) -> tuple[StepStat, ...]:
    """Infer the steps of a run; () if no request received its tokens one by one.

    `cached_share`: share of the prompt tokens found in the prefix cache, used if the requests
    themselves do not report it.
    """
    requests = one_token_requests(run)
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


def one_token_requests(run: RunTrace) -> list[RequestTrace]:
    """Requests that received one token per chunk, from which steps can be inferred."""
    return [r for r in run.requests if r.token_s and set(r.token_counts) == {1}]


def _with_hits(request: RequestTrace, share: float) -> RequestTrace:
    return msgspec.structs.replace(request, cached_tokens=int(share * request.prompt_tokens))


def _begin(request: RequestTrace, began: PrefillStart | None) -> float | None:
    start_s = None if began is None else began(request)
    return None if start_s is None else min(max(start_s, request.sent_s), request.token_s[0])


def _steps(
    requests: Sequence[RequestTrace], begins: Sequence[float | None]
) -> tuple[list[_Span], list[Sequence[_SeenToken]]]:
    """The steps in which a client received a token, and those tokens."""
    seen = sorted(
        (
            _SeenToken(at_s, i, n)
            for i, r in enumerate(requests)
            for n, at_s in enumerate(r.token_s)
        ),
        key=lambda token: token.at_s,
    )
    instants = [token.at_s for token in seen]
    late_s = LATE_SHARE * _typical_gap_s(requests)
    first, spans = 0, list[_Span]()
    tokens: list[Sequence[_SeenToken]] = []
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
    """The steps between the leaders' tokens, in order."""
    end_s, upcoming = -1.0, 0
    while True:
        while upcoming < len(requests) and requests[upcoming].token_s[0] <= end_s:
            upcoming += 1
        running = [r for r in requests[:upcoming] if r.token_s[-1] > end_s]
        if running:
            leader = max(running, key=lambda request: request.token_s[-1])
        elif upcoming < len(requests):
            leader, start_s = requests[upcoming], begins[upcoming]
            begin_s = max(end_s, leader.sent_s if start_s is None else start_s)
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
    seen: Sequence[Sequence[_SeenToken]],
) -> list[list[Chunk]]:
    """The prompt chunks that were computed in each step."""
    chunks: list[list[Chunk]] = [[] for _ in spans]
    for last, tokens in enumerate(seen):
        for token in tokens:
            if token.number == 0:
                begin_s = begins[token.request]
                for i, chunk in _pieces(requests[token.request], begin_s, spans, last):
                    chunks[i].append(chunk)
    return chunks


def _pieces(
    request: RequestTrace, begin_s: float | None, spans: Sequence[_Span], last: int
) -> Iterator[tuple[int, Chunk]]:
    """Divide a prompt among the steps from its start to the step of its first token, `last`."""
    new = max(1, request.prompt_tokens - request.cached_tokens)
    done, first = request.prompt_tokens - new, last
    while begin_s is not None and first > 0 and spans[first - 1].middle_s > begin_s:
        first -= 1  # a prompt takes part in the whole step or not at all
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
    seen: Sequence[_SeenToken],
    chunks: Sequence[Chunk],
    requests: Sequence[RequestTrace],
) -> StepStat:
    numbers = {
        token.request: token.number for token in reversed(seen)
    }  # the first token per request counts
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
