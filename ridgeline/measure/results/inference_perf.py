"""Result files of inference-perf (in seconds).

    summary_lifecycle_metrics.json, stage_N_…   successes.latency.NAME.{mean,median,p99}
    per_request_lifecycle_metrics.json          a list: start, chunks, the server's usage, error

Its summary uses token counts of its own tokenizer; requests contain the server's count, which is
used here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.measure.results.result_file import (
    LoadedResult,
    NotThisFormat,
    known_facts,
    known_numbers,
    parse_summary,
)

TOOL = "inference-perf"
LATENCIES = (
    ("time_to_first_token", "ttft"),
    ("time_per_output_token", "tpot"),
    ("inter_token_latency", "itl"),
    ("request_latency", "e2e"),
)


def read(source: str, data: Any) -> LoadedResult:
    """Read either kind. Raises NotThisFormat, or KeyError or TypeError for missing keys."""
    if isinstance(data, list):
        return _requests(source, data)
    latency = data["successes"]["latency"]
    figures: dict[str, float] = {}
    for theirs, ours in LATENCIES:
        figures |= parse_summary(ours, latency.get(theirs) or {}, 1.0)
    rates = data["successes"].get("throughput") or {}
    figures |= known_numbers(
        output_tok_s=rates.get("output_tokens_per_sec"), request_rate=rates.get("requests_per_sec")
    )
    load = data.get("load_summary") or {}
    return LoadedResult(
        source=source,
        tool=TOOL,
        figures=figures,
        load=known_facts(
            num_requests=load.get("count"), request_rate=load.get("requested_rate") or None
        ),
    )


def _requests(source: str, rows: Sequence[Mapping[str, Any]]) -> LoadedResult:
    """Latencies of successful requests, in the order of their sends."""
    if not rows or "info" not in rows[0]:
        raise NotThisFormat
    answers = [
        (row["start_time"], response["chunk_times"], _num_tokens(response))
        for row in sorted(rows, key=lambda row: row["start_time"])
        for response in [row["info"]["response_metrics"]]
        if not row.get("error") and response.get("chunk_times")
    ]
    return LoadedResult(
        source=source,
        tool=TOOL,
        samples={
            "ttft": tuple(times[0] - sent for sent, times, _ in answers),
            "e2e": tuple(times[-1] - sent for sent, times, _ in answers),
            "tpot": tuple(
                (times[-1] - times[0]) / (num - 1)
                for _, times, num in answers
                if num > 1 and len(times) > 1
            ),
        },
        load={"num_requests": len(rows)},
    )


def _num_tokens(response: Mapping[str, Any]) -> int:
    usage = response.get("server_usage") or {}
    return int(usage.get("completion_tokens") or response["output_tokens"])
