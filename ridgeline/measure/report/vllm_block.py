"""The console block of `vllm bench serve`, from the keys of its result file.

Definitions are vLLM's: latencies from the send, ITL between chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

WIDTH = 50
_COUNTS = (
    ("Successful requests:", "completed", "{:<10}"),
    ("Failed requests:", "failed", "{:<10}"),
    ("Maximum request concurrency:", "max_concurrency", "{:<10}"),
    ("Request rate configured (RPS):", "request_rate", "{:<10}"),
    ("Benchmark duration (s):", "duration", "{:<10.2f}"),
    ("Total input tokens:", "total_input_tokens", "{:<10}"),
    ("Total generated tokens:", "total_output_tokens", "{:<10}"),
    ("Request throughput (req/s):", "request_throughput", "{:<10.2f}"),
    ("Request goodput (req/s):", "request_goodput", "{:<10.2f}"),
    ("Output token throughput (tok/s):", "output_throughput", "{:<10.2f}"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", "{:<10.2f}"),
    ("Peak concurrent requests:", "max_concurrent_requests", "{:<10.2f}"),
    ("Total token throughput (tok/s):", "total_token_throughput", "{:<10.2f}"),
)
_SECTIONS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2e": ("End-to-end Latency", "E2EL"),
}


def vllm_block(
    result: Mapping[str, object], metrics: Sequence[str], percentiles: Sequence[float]
) -> str:
    """The block for these metrics (`ttft`, `tpot`, `itl`, `e2e`) and percentiles (0 to 100)."""
    return "\n".join(_lines(result, metrics, percentiles))


def _lines(
    result: Mapping[str, object], metrics: Sequence[str], percentiles: Sequence[float]
) -> Iterator[str]:
    yield "{s:{c}^{n}}".format(s=" Serving Benchmark Result ", n=WIDTH, c="=")
    for label, key, form in _COUNTS:
        value = result.get(key)
        if value is not None and value != "inf":
            yield f"{label:<40} {form.format(value)}"
    for name in metrics:
        if name not in _SECTIONS:
            continue  # vLLM has no such metric
        title, short = _SECTIONS[name]
        key = "e2el" if name == "e2e" else name
        yield "{s:{c}^{n}}".format(s=title, n=WIDTH, c="-")
        rows = [("Mean", "mean"), ("Median", "median")]
        rows += [(f"P{q:g}", f"p{q:g}") for q in percentiles]
        for shown, statistic in rows:
            value = result[f"{statistic}_{key}_ms"]
            yield f"{f'{shown} {short} (ms):':<40} {value:<10.2f}"
    yield "=" * WIDTH
