"""The same losses for a server that gives no step records: the client's instants, and its means.

The server's own histograms say how long requests waited and computed on average; its gauges say
what was short while they waited. Both come in as plain numbers (`queue_s`, `kv_used_share_p95`, …),
under the names of measure/server. What the server does not tell stays with its stage: without a
queue time all of the time to first token counts as prefill.
"""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.diagnose.blame import LOSSES, Blame, shares_of
from ridgeline.records import RequestTrace, RunTrace

FULL_KV = 0.9


def blame_server(
    run: RunTrace, told: Mapping[str, float], missed_prefix: float = 0.0
) -> Blame | None:
    """None where no request had tokens. `told` may be empty."""
    done = [request for request in run.requests if request.error is None and request.token_s]
    if not done:
        return None
    rows = [_of_request(request, told, missed_prefix) for request in done]
    totals = [max(r.token_s[-1] - r.scheduled_s, 1e-9) for r in done]
    return Blame(shares=shares_of(rows, totals), num_requests=len(done), total_s=sum(totals))


def _of_request(
    request: RequestTrace, told: Mapping[str, float], missed_prefix: float
) -> dict[str, float]:
    lost = dict.fromkeys(LOSSES, 0.0)
    first_s, last_s = request.token_s[0], request.token_s[-1]
    to_first_s = first_s - request.sent_s
    queue_s = min(to_first_s, told.get("queue_s", 0.0))
    prefill_s = to_first_s - queue_s
    if "prefill_s" in told and "queue_s" in told:
        lost["front"] = max(0.0, prefill_s - told["prefill_s"])
        prefill_s -= lost["front"]
    lost["client_send"] = request.sent_s - request.scheduled_s
    short_of_kv = told.get("kv_used_share_p95", 0.0) > FULL_KV or told.get("preemptions", 0) > 0
    lost["kv" if short_of_kv else "seats"] = queue_s
    lost["prefix_miss"] = missed_prefix * prefill_s
    lost["prefill"] = prefill_s - lost["prefix_miss"]
    lost["decode"] = last_s - first_s
    return lost
