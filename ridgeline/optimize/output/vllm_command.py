"""The same settings as a `vllm serve` command line, with notes on what vLLM lacks.

Setting names follow vLLM's. Differences are stated, not dropped: a flag that is silently ignored is
worse than a note.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.hub.names import HubModel, parse_remote
from ridgeline.hub.registry_models import registry_models

_VALUE_FLAGS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "block_size",
)
VLLM_DRAFTS = 4  # vLLM has no automatic depth
_SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill")


class VllmCommand(msgspec.Struct, frozen=True):
    """A command line and what the reader must know about it."""

    text: str
    notes: tuple[str, ...] = ()


def serve_command(settings: Settings, original: str | None = None) -> VllmCommand:
    """`vllm serve …` for these settings. `original`: the model from which the weights were
    quantised.
    """
    model = original or settings.model
    words = ["vllm", "serve", *_vllm_model(model)]
    if settings.dtype != "auto":
        words += ["--dtype", settings.dtype]
    for name in _VALUE_FLAGS:
        if (value := getattr(settings, name)) is not None:
            words += [_flag(name), str(value)]
    if settings.kv_cache_dtype == "bfloat16":
        words += ["--kv-cache-dtype", "bfloat16"]
    words += [_flag(name if getattr(settings, name) else f"no_{name}") for name in _SWITCHES]
    if settings.speculative_config is not None:
        words += ["--speculative-config", json.dumps(_speculative(settings))]
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(settings, name)) > 1:
            words += [_flag(name), str(size)]
    if settings.expert_parallel_size > 1:
        words += ["--enable-expert-parallel"]
    if settings.generation_config != "auto":
        words += ["--generation-config", settings.generation_config]
    if settings.seed:
        words += ["--seed", str(settings.seed)]
    requested = msgspec.structs.replace(settings, model=model)
    notes = tuple(note for when, note in _NOTES if when(requested))
    if model != settings.model:
        notes = (_MADE.format(made=settings.model, original=model), *notes)
    return VllmCommand(shlex.join(words), notes)


def _vllm_model(model: str) -> list[str]:
    """A repository and its revision as vLLM names them; other models as they are."""
    remote = None if model in registry_models() else parse_remote(model)
    if not isinstance(remote, HubModel):
        return [model]
    return [remote.repo, *(["--revision", remote.revision] if remote.revision else [])]


def _speculative(settings: Settings) -> dict[str, object]:
    given = msgspec.to_builtins(settings.speculative_config)
    options = {name: value for name, value in given.items() if value is not None}
    return {"num_speculative_tokens": VLLM_DRAFTS, **options}


def ridgeline_command(config: str) -> str:
    """`ridgeline serve` with the written configuration file."""
    return shlex.join(["ridgeline", "serve", "--config", config])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_MADE = (
    "The best weights ({made}) are in Ridgeline's own format; for vLLM write them with "
    "`ridgeline quantize {original} --format compressed-tensors`."
)
_NOTES: tuple[tuple[Callable[[Settings], bool], str], ...] = (
    (
        lambda s: s.model in ("demo", *registry_models()) or s.model.startswith("dummy:"),
        "The model is one of Ridgeline's own names: give vLLM a model directory or a Hub id.",
    ),
    (
        lambda s: s.quantization == "int8",
        "quantization=int8: vLLM reads INT8 W8A8 from a checkpoint that was quantised before "
        "(llm-compressor writes one); it does not quantise to INT8 while loading.",
    ),
    (
        lambda s: s.quantization == "int4",
        "quantization=int4: vLLM reads INT4 from a checkpoint that was quantised before "
        "(GPTQ, AWQ or compressed-tensors); it does not quantise to INT4 while loading.",
    ),
    (
        lambda s: s.lm_head_quantization is not None,
        "lm_head_quantization: vLLM keeps the LM head as the checkpoint stores it.",
    ),
    (
        lambda s: s.activations != "int8",
        "activations: vLLM's are those of the checkpoint's scheme (weight-only: W4A16, W8A16).",
    ),
    (
        lambda s: (
            s.speculative_config is not None and s.speculative_config.num_speculative_tokens is None
        ),
        f"speculative_config: vLLM chooses no depth by itself; {VLLM_DRAFTS} drafts are a guess.",
    ),
    (
        lambda s: s.kv_cache_dtype not in ("auto", "bfloat16"),
        "kv_cache_dtype: vLLM's own value of this flag for 8 bits is fp8, a different format; "
        "left to its choice.",
    ),
    (
        lambda s: s.kv_eviction_config is not None and s.kv_eviction_config.evicts,
        "kv_eviction_config: vLLM keeps every key and value; eviction has no equivalent.",
    ),
    (
        lambda s: s.batching != "continuous",
        "batching: vLLM always batches continuously; static and dynamic have no equivalent.",
    ),
    (
        lambda s: s.batching == "continuous" and not s.enable_chunked_prefill,
        "Without chunked prefill vLLM wants --max-num-batched-tokens of at least --max-model-len.",
    ),
    (
        lambda s: s.prefix_cache_ttl_s is not None,
        "prefix_cache_ttl_s: vLLM evicts by recency alone; a time to live has no equivalent.",
    ),
    (
        lambda s: bool(s.num_threads or s.num_threads_decode or s.thread_plan != "fixed"),
        "num_threads, num_threads_decode, thread_plan: on a CPU set "
        "VLLM_CPU_OMP_THREADS_BIND instead.",
    ),
    (
        lambda s: s.attention_backend != "auto",
        "attention_backend: vLLM has other names for its own kernels; left to its choice.",
    ),
    (
        lambda s: s.layer_backend != "auto",
        "layer_backend: vLLM fuses its layers by its compilation config; left to its choice.",
    ),
)
