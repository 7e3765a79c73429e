"""Ends a run when the SLO of every request is decided rather than when the last token arrives.

With limits on TTFT and TPOT, a load is decided once the last arrival has had time for its first
tokens: a request without any by then has missed its TTFT, and one that meets its TPOT under full
load meets it when other requests leave. Waiting for the last token of every response would take
longer than the load itself. So the run is cut at that point, and responses in flight are judged by
their TPOT so far and completed at that rate on paper (the number of remaining tokens is known in
workloads of fixed lengths). With a limit on e2e, or with latency as the objective, runs complete.
"""

from __future__ import annotations

import msgspec

from ridgeline.measure.metrics.latency import tpot_s
from ridgeline.records import RequestTrace, RunTrace, Slo

PACE_TOKENS = 12  # that the last arrival is given time for
MIN_TOKENS = 5  # after the first, to know a pace
UNFINISHED = "unfinished"  # in the error of requests in flight when a run was cut


def time_to_decide_s(slo: Slo) -> float | None:
    """Seconds after the last arrival at which the SLO is decided; None if all requests must
    complete.
    """
    if slo.e2e_s is not None or slo.ttft_s is None or slo.tpot_s is None:
        return None
    return slo.ttft_s + PACE_TOKENS * slo.tpot_s


def complete_unfinished(run: RunTrace) -> RunTrace:
    """The run with its cut-off responses completed at their TPOT so far."""
    requests = tuple(map(_complete_request, run.requests))
    return msgspec.structs.replace(run, requests=requests)


def _complete_request(request: RequestTrace) -> RequestTrace:
    cut = request.error is not None and UNFINISHED in request.error
    if not cut or request.requested_tokens is None or sum(request.token_counts[1:]) < MIN_TOKENS:
        return request
    pace_s = tpot_s(request) or 0.0
    left = max(0, request.requested_tokens - sum(request.token_counts))
    return msgspec.structs.replace(
        request,
        error=None,
        finish_reason="length",
        output_tokens=request.requested_tokens,
        finished_s=request.token_s[-1] + left * pace_s,
    )
