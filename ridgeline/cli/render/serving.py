"""A server that has started, and a batch file that was processed, as lines of text."""

from __future__ import annotations

from ridgeline.workflows.serving.answer_batch import BatchFileResult
from ridgeline.workflows.serving.serve import ServedModel


def served_lines(served: ServedModel) -> list[str]:
    """The resolved settings that matter most, and the addresses; a key itself is not shown."""
    info = served.engine
    capacity = info.kv_tokens
    chat_key = " --api-key KEY" if served.needs_key else ""
    client_key = " OPENAI_API_KEY=KEY" if served.needs_key else ""
    kv_mib = capacity * info.kv_bytes_per_token / 2**20
    lines = [
        f"{info.device} · {info.compute_dtype} · weights {info.weight_bytes / 2**20:,.1f} MiB",
        f"KV cache {kv_mib:,.1f} MiB = {capacity:,} tokens · context {info.max_model_len:,}",
        f"{served.name} is served at {served.url}/v1",
        f"  chat and live metrics  {served.url}/",
        f"  chat in a terminal     ridgeline chat --url {served.url}{chat_key}",
        f"  OpenAI clients         export OPENAI_BASE_URL={served.url}/v1{client_key}",
    ]
    if (defaults := str(info.default_sampling)) != "none":
        lines.insert(2, f"sampling defaults of the model: {defaults}")
    if info.compute_dtype != "float32":
        lines.insert(1, f"computed in {info.compute_dtype}: tokens can depend on the batch")
    if served.needs_key:
        lines.append("  KEY                    one of the API keys that this server was given")
    if served.admin_url is not None:
        lines.append(f"  operators              {served.admin_url}/admin/state")
    return lines


def batch_line(result: BatchFileResult) -> str:
    """`12 of 12 requests answered · 3,400 prompt and 512 output tokens (300 from the cache)`."""
    cached = f" ({result.cached_tokens:,} from the cache)" if result.cached_tokens else ""
    return (
        f"{result.completed:,} of {result.total:,} requests answered · "
        f"{result.prompt_tokens:,} prompt and {result.completion_tokens:,} output tokens{cached}"
    )
