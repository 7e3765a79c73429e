"""Runs end when every promise is decided, not when the last answer is written.

A load with promises on the first token and on the pace is decided once the last arrival has had
time for its first tokens: who has none by then has missed the first promise, and who keeps the pace
under the full load keeps it when the others leave. Waiting for the last word of every answer would
take longer than the load itself, in every run of a climb. So a run is cut then, and what is still
being written is judged by its pace so far and completed at that pace on paper (a workload of fixed
lengths knows how many tokens are left). Where whole answers are promised, or latency is the
objective, runs are waited for.
"""

from __future__ import annotations

import msgspec

from ridgeline.measure.metrics import tpot_s
from ridgeline.records import RequestTrace, RunTrace, Slo

PACE_TOKENS = 12  # that the last arrival is given time for
LEAST_TOKENS = 5  # after the first, to know a pace
UNFINISHED = "unfinished"  # in the error of what was in flight when a run was cut


def time_to_decide_s(slo: Slo) -> float | None:
    """How long after the last arrival every promise is decided; None: when all have ended."""
    if slo.e2e_s is not None or slo.ttft_s is None or slo.tpot_s is None:
        return None
    return slo.ttft_s + PACE_TOKENS * slo.tpot_s


def complete_unfinished(run: RunTrace) -> RunTrace:
    """The run with what was cut in its middle completed at its pace so far."""
    requests = tuple(map(_complete_request, run.requests))
    return msgspec.structs.replace(run, requests=requests)


def _complete_request(request: RequestTrace) -> RequestTrace:
    cut = request.error is not None and UNFINISHED in request.error
    if not cut or request.asked_tokens is None or sum(request.token_counts[1:]) < LEAST_TOKENS:
        return request
    pace_s = tpot_s(request) or 0.0
    left = max(0, request.asked_tokens - sum(request.token_counts))
    return msgspec.structs.replace(
        request,
        error=None,
        finish_reason="length",
        output_tokens=request.asked_tokens,
        finished_s=request.token_s[-1] + left * pace_s,
    )
