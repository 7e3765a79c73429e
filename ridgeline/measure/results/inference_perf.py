"""inference-perf's result files, in seconds.

    summary_lifecycle_metrics.json, stage_N_…   successes.latency.NAME.{mean,median,p99}
    per_request_lifecycle_metrics.json          a list: start, chunks, the server's usage, error

Its summary divides by tokens that it counts itself in the answer's text, with the tokenizer that it
was given; the requests carry the server's own count, which is taken here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.measure.results.result_file import (
    LoadedResult,
    NotThisFormat,
    present,
    present_numbers,
    summary_of,
)

TOOL = "inference-perf"
LATENCIES = (
    ("time_to_first_token", "ttft"),
    ("time_per_output_token", "tpot"),
    ("inter_token_latency", "itl"),
    ("request_latency", "e2e"),
)


def read(source: str, data: Any) -> LoadedResult:
    """Either kind. Raises NotThisFormat, or what a missing key raises."""
    if isinstance(data, list):
        return _requests(source, data)
    latency = data["successes"]["latency"]
    figures: dict[str, float] = {}
    for theirs, ours in LATENCIES:
        figures |= summary_of(ours, latency.get(theirs) or {}, 1.0)
    rates = data["successes"].get("throughput") or {}
    figures |= present_numbers(
        output_tok_s=rates.get("output_tokens_per_sec"), request_rate=rates.get("requests_per_sec")
    )
    load = data.get("load_summary") or {}
    return LoadedResult(
        source=source,
        tool=TOOL,
        figures=figures,
        load=present(
            num_requests=load.get("count"), request_rate=load.get("requested_rate") or None
        ),
    )


def _requests(source: str, rows: Sequence[Mapping[str, Any]]) -> LoadedResult:
    """Latencies of the requests that ended well, in the order of their sends."""
    if not rows or "info" not in rows[0]:
        raise NotThisFormat
    told = [
        (row["start_time"], response["chunk_times"], _num_tokens(response))
        for row in sorted(rows, key=lambda row: row["start_time"])
        for response in [row["info"]["response_metrics"]]
        if not row.get("error") and response.get("chunk_times")
    ]
    return LoadedResult(
        source=source,
        tool=TOOL,
        samples={
            "ttft": tuple(times[0] - sent for sent, times, _ in told),
            "e2e": tuple(times[-1] - sent for sent, times, _ in told),
            "tpot": tuple(
                (times[-1] - times[0]) / (num - 1)
                for _, times, num in told
                if num > 1 and len(times) > 1
            ),
        },
        load={"num_requests": len(rows)},
    )


def _num_tokens(response: Mapping[str, Any]) -> int:
    usage = response.get("server_usage") or {}
    return int(usage.get("completion_tokens") or response["output_tokens"])
