"""What a user may ask of an engine: the flags of `ridgeline serve`, under vLLM's names.

`Settings` is stage one of configuration ("asked"): None means "derive it", and the engine's
assembler resolves each into a plain value with its derivation (`ridgeline explain`). It is also the
content of the `[engine]` table of a `ridgeline.toml`.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from ridgeline.errors import BadInput

Batching = Literal["static", "dynamic", "continuous"]
DraftMethod = Literal[
    "ngram", "suffix", "lookahead", "draft_model", "self", "medusa", "eagle", "auto"
]
MAX_DRAFT_TOKENS = 128  # vLLM's MAX_SPEC_LEN


class Speculative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding as asked: the keys of vLLM's `--speculative-config`.

    `num_speculative_tokens`: drafts per sequence and step (None: as many as pay, by measured cost).
    `prompt_lookup_min`, `prompt_lookup_max`: lengths of the n-grams that "ngram" looks up. `model`,
    `quantization`: the draft model (of "auto", where there is one) and the format of its layers'
    weights. `draft_sample_method`:
    draft the likeliest token, or draw it (requests without a seed). `rejection_sample_method`: how
    drawn drafts are judged. `speculative_token_tree`: the tree that "medusa" drafts, as a list of
    nodes (`engine.speculate.tree`).
    """

    method: DraftMethod
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    model: str | None = None
    quantization: Literal["int8", "int4", "bf16"] | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] | None = None
    rejection_sample_method: Literal["block", "standard"] | None = None
    speculative_token_tree: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_DRAFT_TOKENS:
                what = f"{name} of the speculative config is out of range"
                raise BadInput(what, value=value, limit=f"1..{MAX_DRAFT_TOKENS}")


MOST_THREADS = 1024  # more than any machine has: each takes memory when it starts


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine settings as asked. Counts are tokens or sequences, sizes bytes, times milliseconds."""

    model: str = "demo"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    quantization: Literal["int8", "int4", "bf16"] | None = None
    lm_head_quantization: Literal["int8", "int4", "bf16"] | None = None
    activations: Literal["int8", "int16", "float32"] = "int8"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    kv_cache_memory_bytes: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool = True
    prefix_cache_ttl_s: float | None = None
    enable_chunked_prefill: bool = True
    batching: Batching = "continuous"
    batch_wait_ms: float = 10.0
    background_tokens: int | None = None
    attention_backend: str = "auto"
    layer_backend: str = "auto"
    num_threads: int | None = None
    num_threads_decode: int | None = None
    thread_plan: Literal["fixed", "auto"] = "fixed"
    speculative_config: Speculative | None = None
    max_num_queued_reqs: int | None = 1024
    max_num_queued_tokens: int | None = 1 << 20
    slo_throttle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory_bytes",
            "block_size",
            "num_threads",
            "num_threads_decode",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "--" + name.replace("_", "-")
                raise BadInput(f"{flag} must be positive", value=value, limit=">= 1")
            if value is not None and "threads" in name and value > MOST_THREADS:
                flag = "--" + name.replace("_", "-")
                raise BadInput(f"{flag} is too large", value=value, limit=f"<= {MOST_THREADS}")
        if self.background_tokens is not None and self.background_tokens < 0:
            raise BadInput("--background-tokens is negative", value=self.background_tokens)
        for name in ("batch_wait_ms", "prefix_cache_ttl_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                flag = "--" + name.replace("_", "-")
                raise BadInput(f"{flag} is no length of time", value=value, limit=">= 0")


NAIVE = {
    "batching": "static",
    "max_num_seqs": 1,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
}
"""What a naive deployment does: one request at a time, no reuse. The baseline of `optimize`."""


def load_settings(path: Path) -> tuple[Settings, dict[str, Any]]:
    """Read a `ridgeline.toml`: its `[engine]` table as Settings, its `[server]` as it stands."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            "cannot read the configuration file", value=str(path), fix=str(error)
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(
            "the configuration is not valid TOML", value=str(path), fix=str(error)
        ) from None
    unknown = sorted(set(document) - {"engine", "server", "provenance"})
    if unknown:
        raise BadInput(
            "unknown table in the configuration",
            value=unknown[0],
            limit="engine, server, provenance",
        )
    return settings_from(document.get("engine", {}), where=str(path)), document.get("server", {})


def settings_from(values: dict[str, Any], *, where: str = "settings") -> Settings:
    """Settings from plain values; an unknown name or a wrong type is an error that names it."""
    try:
        return msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(Settings))
        raise BadInput(f"{where}: {error}", limit=f"known settings: {known}") from None


def changed(settings: Settings) -> dict[str, Any]:
    """Only what differs from the defaults, for a short configuration file."""
    default = Settings()
    return {
        field.name: _plain(getattr(settings, field.name))
        for field in msgspec.structs.fields(Settings)
        if getattr(settings, field.name) != getattr(default, field.name)
    }


def _plain(value: Any) -> Any:
    """A nested record as a table of what was asked in it."""
    if not isinstance(value, msgspec.Struct):
        return value
    return {k: v for k, v in msgspec.structs.asdict(value).items() if v is not None}
