"""The three result files of AIPerf, in one set of names.

    profile_export_aiperf.json   NAME: {avg, p50, …, unit}
    profile_export_aiperf.csv    two tables: "Title (unit),avg,min,…" and "Title (unit),Value"
    profile_export.jsonl         a request per line: {"metrics": {NAME: {value, unit}}}

Its inter-token latency is one value per request, without the first token: TPOT in Ridgeline's
terms.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.measure.results.result_file import (
    LoadedResult,
    NotThisFormat,
    known_facts,
    parse_summary,
)

LATENCIES = (
    ("time_to_first_token", "ttft"),
    ("inter_token_latency", "tpot"),
    ("request_latency", "e2e"),
)
REQUESTS_FILE = "profile_export.jsonl"  # in the folder of a run
RATES = (
    ("output_token_throughput", "output_tok_s"),
    ("request_throughput", "request_rate"),
    ("goodput", "goodput"),
)
UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9}


def summary(source: str, data: Mapping[str, Any]) -> LoadedResult:
    """The JSON summary file."""
    figures: dict[str, float] = {}
    for theirs, ours in LATENCIES:
        row = data.get(theirs) or {}
        figures |= parse_summary(ours, row, UNITS[row["unit"]]) if row else {}
    if not figures:
        raise NotThisFormat
    for theirs, ours in RATES:
        if data.get(theirs):
            figures[ours] = float(data[theirs]["avg"])
    count = (data.get("request_count") or {}).get("avg")
    return LoadedResult(
        source=source, tool="aiperf", figures=figures, load=known_facts(num_requests=count)
    )


def table(source: str, text: str) -> LoadedResult:
    """The CSV file, whose rates are in a separate table."""
    metrics: dict[str, dict[str, Any]] = {}
    header: list[str] = []
    for row in csv.reader(text.splitlines()):
        if row[:1] == ["Metric"]:
            header = ["avg" if name == "Value" else name for name in row[1:]]
        elif len(row) > 1 and header:
            title, _, unit = row[0].partition(" (")
            name = title.lower().replace(" ", "_")
            cells = zip(header, row[1:], strict=False)
            metrics[name] = {key: float(cell) for key, cell in cells if cell}
            metrics[name]["unit"] = unit.removesuffix(")")
    return summary(source, metrics)


def requests(source: str, rows: Sequence[Mapping[str, Any]]) -> LoadedResult:
    """The JSONL file, one request per line; failed requests are skipped."""
    successful = [row["metrics"] for row in rows if not row.get("error")]
    samples = {}
    for theirs, ours in LATENCIES:
        cells = [row[theirs] for row in successful if theirs in row]
        samples[ours] = tuple(cell["value"] * UNITS[cell["unit"]] for cell in cells)
    if not samples["e2e"]:
        raise NotThisFormat
    return LoadedResult(
        source=source, tool="aiperf", samples=samples, load={"num_requests": len(rows)}
    )
