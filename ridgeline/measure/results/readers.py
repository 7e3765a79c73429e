"""Readers of result files; the format is recognised by the keys of the file.

    ridgeline        event log (`bench --log`, JSONL or Parquet): every request
    vllm             `vllm bench serve --save-result [--save-detailed]`; `ridgeline bench --json`
    guidellm         benchmarks[0].metrics.NAME.successful.{mean,median,percentiles}, .requests
    aiperf           profile_export_aiperf.json and .csv, profile_export.jsonl (aiperf.py)
    inference-perf   *_lifecycle_metrics.json (inference_perf.py)
    llmperf          *_summary.json: results_NAME_quantiles_p99; *_individual_responses.json

Definitions differ by tool (docs/concepts/measurements.md): llmperf's inter-token latency and
GuideLLM's TPOT include the first token. Such figures have separate names (`tpot_incl_first`) and
are never compared with Ridgeline's.

Written from files of these releases: vLLM 0.32, GuideLLM 0.8.1, AIPerf 0.13.0, inference-perf 0.7.0
(samples are in tests/measure/other_tools); llmperf from its source and published result files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.errors import DECODE_ERRORS
from ridgeline.measure.metrics.goodput import validity_of
from ridgeline.measure.metrics.latency import e2e_s, itl_s, outcome, tpot_s, ttft_s
from ridgeline.measure.results import aiperf, inference_perf
from ridgeline.measure.results.event_log import is_event_log, read_run
from ridgeline.measure.results.result_file import (
    MS,
    LoadedResult,
    NotThisFormat,
    known_facts,
    known_numbers,
    missing_file,
    parse_summary,
    run_key,
    unreadable_error,
)
from ridgeline.measure.results.vllm_result import start_date

Json = dict[str, Any]


def read_result(path: Path) -> LoadedResult:
    """Read the result file of any supported tool. Raises BadInput."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise missing_file(path) from None
    except OSError as error:
        raise unreadable_error(path, error.strerror or str(error)) from None
    if is_event_log(data):
        return _event_log(path)
    try:
        document = msgspec.json.decode(data)
    except DECODE_ERRORS:
        return _lines(path, data)
    for reader in _READERS:
        try:
            return reader(str(path), document)
        except (NotThisFormat, LookupError, TypeError, AttributeError, ArithmeticError):
            continue
    raise unreadable_error(path, "it has the keys of none of these tools")


def _event_log(path: Path) -> LoadedResult:
    run = read_run(path)
    done = [request for request in run.requests if outcome(request) == "ok"]
    columns: dict[str, list[float | None]] = {
        "ttft": [ttft_s(r) for r in done],
        "tpot": [tpot_s(r) for r in done],
        "e2e": [e2e_s(r) for r in done],
        "itl": [_mean(itl_s(r)) for r in done],
    }
    duration_s = run.duration_s or 1.0
    return LoadedResult(
        source=str(path),
        tool="ridgeline",
        samples={name: _defined(values) for name, values in columns.items()},
        ids=tuple(r.id for r in done) if all(v is not None for v in columns["tpot"]) else (),
        figures={
            "output_tok_s": sum(r.output_tokens for r in done) / duration_s,
            "request_rate": len(done) / duration_s,
            "failed_share": 1 - len(done) / max(1, len(run.requests)),
        },
        load={
            "workload": run.workload,
            "arrivals": run.arrivals,
            "num_requests": len(run.requests),
            "output_tokens": sum(r.requested_tokens or 0 for r in run.requests),
        },
        config=_config(run.info.settings if run.info else {}),
        invalid=validity_of(run).reasons,
        run=run_key(start_date(run), run.seed),
        busy_share=None if run.machine_load is None else run.machine_load.taken_share,
    )


def _config(settings: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in settings.items()}


def _defined(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _vllm(source: str, data: Json) -> LoadedResult:
    if "request_throughput" not in data or "completed" not in data:
        raise NotThisFormat
    figures = _stats(data, {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e"})
    figures["output_tok_s"] = float(data["output_throughput"])
    figures["request_rate"] = float(data["request_throughput"])
    if data.get("request_goodput") is not None:
        figures["goodput"] = float(data["request_goodput"])
    ours = data.get("ridgeline") or {}
    whole = not any(data.get("errors") or ())
    return LoadedResult(
        source=source,
        tool="vllm",
        samples=_vllm_samples(data),
        ids=tuple(ours.get("request_ids") or ()) if whole else (),
        figures=figures,
        load=known_facts(
            num_requests=data.get("num_prompts"),
            request_rate=data.get("request_rate"),
            max_concurrency=data.get("max_concurrency"),
            burstiness=data.get("burstiness"),
            input_tokens=data.get("total_input_tokens"),
            workload=ours.get("workload"),
        ),
        config=_config(ours.get("settings") or {}),
        invalid=tuple(ours.get("invalid") or ()),
        run=run_key(str(data.get("date")), ours["seed"]) if "seed" in ours else "",
        busy_share=ours.get("cpu_taken_share"),
    )


def _vllm_samples(data: Json) -> dict[str, tuple[float, ...]]:
    """Samples of --save-detailed, without failed requests."""
    ttfts, itls = data.get("ttfts"), data.get("itls")
    if not ttfts or not itls:
        return {}
    lens, errors = data.get("output_lens") or [], data.get("errors") or [""] * len(ttfts)
    rows = [row for row in zip(ttfts, itls, lens, errors, strict=False) if not row[3]]
    return {
        "ttft": tuple(row[0] for row in rows),
        "e2e": tuple(row[0] + sum(row[1]) for row in rows),
        "tpot": tuple(sum(row[1]) / (row[2] - 1) for row in rows if row[2] > 1 and row[1]),
    }


def _stats(data: Json, names: Mapping[str, str]) -> dict[str, float]:
    """`mean_ttft_ms`, `median_ttft_ms`, `p99_ttft_ms` in seconds under our names."""
    figures = {}
    for theirs, ours in names.items():
        for key, value in data.items():
            statistic, _, rest = key.partition("_")
            if rest == f"{theirs}_ms" and statistic != "std" and isinstance(value, int | float):
                figures[f"{ours}_{'p50' if statistic == 'median' else statistic}"] = value * MS
    return figures


def _guidellm(source: str, data: Json) -> LoadedResult:
    bench = data["benchmarks"][0]
    metrics = bench["metrics"]
    figures: dict[str, float] = {}
    for theirs, ours, unit in (
        ("time_to_first_token_ms", "ttft", MS),
        ("time_per_output_token_ms", "tpot_incl_first", MS),
        ("inter_token_latency_ms", "itl", MS),
        ("request_latency", "e2e", 1.0),
    ):
        row = (metrics.get(theirs) or {}).get("successful") or {}
        figures |= parse_summary(ours, _percentile_names(row), unit)
    for theirs, ours in (
        ("output_tokens_per_second", "output_tok_s"),
        ("requests_per_second", "request_rate"),
    ):
        mean = ((metrics.get(theirs) or {}).get("successful") or {}).get("mean")
        if mean is not None:
            figures[ours] = float(mean)
    totals = metrics.get("request_totals") or {}
    return LoadedResult(
        source=source,
        tool="guidellm",
        samples=_guidellm_samples(bench.get("requests") or {}),
        figures=figures,
        load=known_facts(num_requests=totals.get("total")),
    )


_GUIDELLM_PERCENTILES = {"p001": "p0.1", "p01": "p1", "p05": "p5", "p999": "p99.9"}


def _percentile_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """GuideLLM omits the decimal point in the names of percentiles: its p001 is the 0.1th."""
    percentiles = row.get("percentiles") or {}
    named = {_GUIDELLM_PERCENTILES.get(name, name): v for name, v in percentiles.items()}
    return {**row, "percentiles": named}


def _guidellm_samples(requests: Json) -> dict[str, tuple[float, ...]]:
    """From the times of each request, in the order of sends; () in older releases."""
    rows = [
        (times["request_start"], times["first_token_iteration"], times["last_token_iteration"], num)
        for row in requests.get("successful") or ()
        for times in [(row.get("info") or {}).get("timings") or {}]
        for num in [(row.get("output_metrics") or {}).get("text_tokens")]
        if times.get("first_token_iteration") is not None
    ]
    rows.sort(key=lambda row: row[0])
    return {
        "ttft": tuple(first - sent for sent, first, _, _ in rows),
        "e2e": tuple(last - sent for sent, _, last, _ in rows),
        "tpot": tuple(
            (last - first) / (num - 1)
            for _, first, last, num in rows
            if num is not None and num > 1 and last > first
        ),
    }


def _llmperf(source: str, data: Any) -> LoadedResult:
    if isinstance(data, list):
        if not data or "ttft_s" not in data[0]:
            raise NotThisFormat
        rows = [row for row in data if row.get("error_code") is None]
        return LoadedResult(
            source=source,
            tool="llmperf",
            samples={
                "ttft": tuple(float(row["ttft_s"]) for row in rows),
                "e2e": tuple(float(row["end_to_end_latency_s"]) for row in rows),
            },
            load={"num_requests": len(data)},
        )
    if "results_ttft_s_mean" not in data:
        raise NotThisFormat
    figures: dict[str, float] = {}
    for theirs, ours in (("ttft_s", "ttft"), ("end_to_end_latency_s", "e2e")):
        for statistic in ("mean", *(f"quantiles_p{q}" for q in (25, 50, 75, 90, 95, 99))):
            value = data.get(f"results_{theirs}_{statistic}")
            if value is not None:
                figures[f"{ours}_{statistic.removeprefix('quantiles_')}"] = float(value)
    per_minute = data.get("results_num_completed_requests_per_min")
    figures |= known_numbers(
        output_tok_s=data.get("results_mean_output_throughput_token_per_s"),
        request_rate=None if per_minute is None else per_minute / 60,
    )
    return LoadedResult(
        source=source,
        tool="llmperf",
        figures=figures,
        load=known_facts(
            num_requests=data.get("results_num_requests_started"),
            mean_input_tokens=data.get("mean_input_tokens"),
            mean_output_tokens=data.get("mean_output_tokens"),
            max_concurrency=data.get("num_concurrent_requests"),
        ),
    )


_READERS: tuple[Callable[[str, Any], LoadedResult], ...] = (
    _vllm,
    _guidellm,
    inference_perf.read,
    _llmperf,
    aiperf.summary,
)


def _lines(path: Path, data: bytes) -> LoadedResult:
    """Files that are not JSON documents: AIPerf's requests, one per line, or its CSV table."""
    try:
        text = data.decode("utf-8")
        return aiperf.table(str(path), text) if "," in text.partition("{")[0] else _rows(path, data)
    except (*DECODE_ERRORS, KeyError, TypeError, AttributeError, NotThisFormat):
        raise unreadable_error(path, "it is neither JSON, JSONL nor AIPerf's CSV table") from None


def _rows(path: Path, data: bytes) -> LoadedResult:
    rows = [msgspec.json.decode(line) for line in data.split(b"\n") if line.strip()]
    return aiperf.requests(str(path), rows)
