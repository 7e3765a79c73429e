"""Settings of the engine, under vLLM's names: the `[engine]` table of a `ridgeline.toml`.

`Settings` holds what was asked for: None means "derive it". The engine resolves every setting into
a plain value with its derivation, which `ridgeline explain` prints.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypedDict

import msgspec

from ridgeline.config.option import About, Section
from ridgeline.config.shared import DEFAULT_MODEL, MODEL_HELP, SEQUENCE_PARALLEL
from ridgeline.config.units import (
    BYTES,
    COUNT,
    DURATION,
    MILLISECONDS,
    NON_NEGATIVE_COUNT,
    NON_NEGATIVE_SECONDS,
    PORT,
    SEED,
    SHARE,
    TOKENS,
    Range,
)
from ridgeline.errors import BadInput
from ridgeline.records.kv_eviction import KvEviction

Batching = Literal["static", "dynamic", "continuous"]
DraftMethod = Literal[
    "ngram", "suffix", "lookahead", "draft_model", "self", "medusa", "eagle", "auto"
]
MAX_DRAFT_TOKENS = 128  # vLLM's MAX_SPEC_LEN
KV, SCHEDULING, EXECUTION = "KV cache", "Scheduling", "Execution"
PARALLELISM, ADAPTERS = "Parallelism", "Adapters"
RANKS = Range(1, 64)
MAX_THREADS = 1024  # more than any machine has; each takes memory when it starts
WeightFormat = Literal["int8", "int4", "fp8", "nvfp4", "sparse-24", "sparse-24-int8", "bf16"]


class Speculative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding, with the keys of vLLM's `--speculative-config`.

    `num_speculative_tokens`: draft tokens per sequence and step (None: as many as pay, by measured
    cost). `prompt_lookup_min`, `prompt_lookup_max`: lengths of the n-grams that "ngram" looks up.
    `model`, `quantization`: the draft model and the format of its weights. `draft_sample_method`:
    draft the most likely token, or sample it (requests without a seed). `rejection_sample_method`:
    how sampled drafts are verified. `speculative_token_tree`: the tree that "medusa" drafts, as a
    list of nodes.
    """

    method: DraftMethod
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    model: str | None = None
    quantization: Literal["int8", "int4", "fp8", "nvfp4", "bf16"] | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] | None = None
    rejection_sample_method: Literal["block", "standard"] | None = None
    speculative_token_tree: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_DRAFT_TOKENS:
                what = f"{name} of the speculative config is out of range"
                raise BadInput(what, value=value, limit=f"1..{MAX_DRAFT_TOKENS}")


class PlainSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that the engine uses as they are given: nothing is derived for them."""

    title: ClassVar[str] = "Engine"
    table: ClassVar[str] = "engine"

    model: Annotated[
        str,
        About(MODEL_HELP, flag=""),
    ] = DEFAULT_MODEL
    generation_config: Annotated[
        str,
        About(
            "Source of default sampling parameters: auto reads the model's generation_config.json "
            "or GGUF metadata, vllm ignores them, a path names another file or folder.",
            metavar="auto|vllm|PATH",
            since="0.3",
        ),
    ] = "auto"
    quantization: Annotated[
        WeightFormat | None,
        About(
            "Quantise the layers' weights when loading, rounding to nearest. `ridgeline quantize` "
            "loses less accuracy at 4 bits.",
            unset="as stored",
        ),
    ] = None
    lm_head_quantization: Annotated[
        Literal["int8", "int4", "fp8", "nvfp4", "bf16"] | None,
        About("Quantise the LM head as well.", unset="as stored"),
    ] = None
    activations: Annotated[
        Literal["int8", "int16", "float32"],
        About(
            "Precision of activations multiplied with 8- and 4-bit weights: int8 (W8A8, W4A8), or "
            "weight-only int16 or float32, at two to three times the arithmetic.",
        ),
    ] = "int8"
    enable_prefix_caching: Annotated[
        bool, About("Reuse the KV cache of prompts that share a prefix.", panel=KV)
    ] = True
    prefix_cache_ttl_s: Annotated[
        float | None,
        About(
            "Evict cached prefixes that were not used for this long.",
            unit=DURATION,
            range=NON_NEGATIVE_SECONDS,
            unset="never",
            panel=KV,
        ),
    ] = None
    prefix_pin_share: Annotated[
        float,
        About(
            "Share of the KV cache that pinned prefixes may take; one API key gets half of it.",
            unit=SHARE,
            panel=KV,
        ),
    ] = 0.5
    kv_tier_memory: Annotated[
        int | None,
        About(
            "Host memory for evicted KV blocks.",
            unit=BYTES,
            unset="none; 256 MiB to pass through with a directory or URL, 512 MiB to hand over",
            panel=KV,
        ),
    ] = None
    kv_tier_dir: Annotated[
        str | None,
        About(
            "Directory for evicted KV blocks, which survive a restart. It holds users' text.",
            metavar="DIR",
            unset="none",
            panel=KV,
        ),
    ] = None
    kv_tier_size: Annotated[
        int | None,
        About("Maximum size of that directory.", unit=BYTES, unset="16 GiB", panel=KV),
    ] = None
    kv_tier_url: Annotated[
        str | None,
        About(
            "Object store for evicted KV blocks, by an fsspec URL such as s3://bucket/path.",
            metavar="URL",
            unset="none",
            panel=KV,
        ),
    ] = None
    disaggregation_mode: Annotated[
        Literal["none", "prefill", "decode", "both"],
        About(
            "Role where prefill and decode run on different servers: prefill computes prompts and "
            "hands out their KV blocks, decode fetches them. Either serves whole requests, too.",
            panel=KV,
            since="0.3",
        ),
    ] = "none"
    disaggregation_host: Annotated[
        str,
        About(
            "Address at which a prefill server hands out KV blocks; it is also the one that decode "
            "servers are given.",
            metavar="ADDRESS",
            panel=KV,
            since="0.3",
        ),
    ] = "127.0.0.1"
    disaggregation_port: Annotated[
        int,
        About("Port of that address; 0 takes a free one.", unit=PORT, panel=KV, since="0.3"),
    ] = 0
    disaggregation_transfer_backend: Annotated[
        Literal["auto", "shm", "tcp"],
        About(
            "How a decode server fetches KV blocks: shared memory on the same host, or TCP; auto "
            "takes shared memory where it can be opened.",
            panel=KV,
            since="0.3",
        ),
    ] = "auto"
    disaggregation_peers: Annotated[
        tuple[str, ...],
        About(
            "Prefill server that a decode server may fetch from, as HOST:PORT with * for any part "
            "(repeatable). The bytes of a block cannot be checked: name servers that you trust.",
            metavar="PATTERN",
            unset="any port of 127.0.0.1",
            panel=KV,
            since="0.3",
        ),
    ] = ()
    disaggregation_timeout_s: Annotated[
        float,
        About(
            "Maximum wait of a decode server for KV blocks, and time for which a prefill server "
            "keeps blocks that are not fetched.",
            unit=DURATION,
            range=Range(0, 3600, exclusive=True),
            panel=KV,
            since="0.3",
        ),
    ] = 30.0
    enable_chunked_prefill: Annotated[
        bool,
        About(
            "Split long prompts over several steps, so that decoding continues.", panel=SCHEDULING
        ),
    ] = True
    async_scheduling: Annotated[
        bool,
        About(
            "On a GPU, launch each greedy decode step while the one before it still runs.",
            panel=SCHEDULING,
            since="0.3",
        ),
    ] = False
    batching: Annotated[
        Batching, About("How requests are combined into batches.", panel=SCHEDULING)
    ] = "continuous"
    batch_wait_ms: Annotated[
        float | None,
        About(
            "Dynamic batching: maximum wait for a fuller batch.",
            unit=MILLISECONDS,
            unset="what the TTFT of the request's SLO class leaves at the p95, or 10",
            panel=SCHEDULING,
        ),
    ] = None
    background_tokens: Annotated[
        int | None,
        About(
            "Token budget of background (batch) requests in a step that also serves interactive "
            "requests; 0 pauses them.",
            unit=TOKENS,
            range=NON_NEGATIVE_COUNT,
            unset="derived from measured step times",
            panel=SCHEDULING,
        ),
    ] = None
    max_num_queued_reqs: Annotated[
        int | None,
        About(
            "Maximum waiting requests; further ones are rejected with a time to retry.",
            unit=COUNT,
            panel=SCHEDULING,
        ),
    ] = 1024
    max_num_queued_tokens: Annotated[
        int | None,
        About("Maximum prompt tokens of waiting requests.", unit=TOKENS, panel=SCHEDULING),
    ] = 1 << 20
    slo_throttle: Annotated[
        bool,
        About(
            "Admit fewer requests of a class while its p95 TTFT or TPOT violates its SLO.",
            panel=SCHEDULING,
        ),
    ] = False
    tensor_parallel_size: Annotated[
        int,
        About(
            "Processes that heads, feed-forward layers and vocabulary are split over.",
            unit=COUNT,
            range=RANKS,
            panel=PARALLELISM,
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        About(
            "Processes, or groups of them, that the layers are divided into as stages.",
            unit=COUNT,
            range=RANKS,
            panel=PARALLELISM,
        ),
    ] = 1
    expert_parallel_size: Annotated[
        int,
        About(
            "Processes that whole experts are spread over: 1, or all that tensor and context"
            " parallelism start.",
            unit=COUNT,
            range=RANKS,
            panel=PARALLELISM,
        ),
    ] = 1
    enable_lora: Annotated[
        bool,
        About(
            "Let requests choose LoRA adapters by their model name; layers run product by product.",
            panel=ADAPTERS,
            since="0.3",
        ),
    ] = False
    lora_modules: Annotated[
        tuple[str, ...],
        About(
            "Adapter to load, a directory as PEFT saves it (repeatable).",
            metavar="NAME=PATH",
            since="0.3",
        ),
    ] = ()
    max_loras: Annotated[
        int,
        About(
            "Maximum adapters loaded at once; memory is reserved for them.", unit=COUNT, since="0.3"
        ),
    ] = 4
    max_lora_rank: Annotated[int, About("Maximum rank of an adapter.", unit=COUNT, since="0.3")] = (
        16
    )
    context_parallel_size: Annotated[
        int,
        About(
            "Processes that the positions of the KV cache are spread over, 512 at a time.",
            unit=COUNT,
            range=RANKS,
            panel=PARALLELISM,
        ),
    ] = 1
    sequence_parallel: Annotated[bool, SEQUENCE_PARALLEL.but(panel=PARALLELISM)] = False
    nnodes: Annotated[
        int,
        About(
            "Machines that the processes of a model are spread over.",
            unit=COUNT,
            range=RANKS,
            panel=PARALLELISM,
            since="0.3",
        ),
    ] = 1
    node_rank: Annotated[
        int,
        About(
            "Number of this machine; all but 0 compute for that one.",
            unit=COUNT,
            range=NON_NEGATIVE_COUNT,
            panel=PARALLELISM,
            since="0.3",
        ),
    ] = 0
    master_addr: Annotated[
        str | None,
        About(
            "Address of machine 0, where the others connect; the next port is used, too.",
            metavar="HOST:PORT",
            unset="one machine",
            panel=PARALLELISM,
            since="0.3",
        ),
    ] = None
    collectives: Annotated[
        Literal["auto", "nccl", "shm", "gloo"],
        About(
            "How processes exchange tensors: auto is nccl on CUDA, else shared memory on one host.",
            panel=PARALLELISM,
            since="0.3",
        ),
    ] = "auto"
    thread_plan: Annotated[
        Literal["fixed", "auto"],
        About("auto measures the best numbers of threads when the engine opens.", panel=EXECUTION),
    ] = "fixed"
    seed: Annotated[
        int,
        About(
            "Sampling seed of requests without one; also seeds loads.", unit=SEED, panel=EXECUTION
        ),
    ] = 0


class Settings(PlainSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine settings. Counts are tokens or sequences, sizes bytes, times what the name says.

    Those declared here, beyond `PlainSettings`, are resolved: None or "auto" means "derive it".
    """

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        About(
            "Data type of weights and activations; auto uses the model's where it can run.",
            panel="Engine",
        ),
    ] = "auto"
    device: Annotated[
        str, About("Device to run on: cpu, cuda, cuda:N or auto.", metavar="DEVICE")
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        About(
            "Maximum prompt plus output length.",
            unit=TOKENS,
            unset="the model's context, or what fits the KV cache",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "int4"],
        About(
            "Data type of the KV cache; auto uses that of the weights for large 16-bit models, "
            "otherwise that of the activations. int8, fp8 and int4 are lossy.",
            panel=KV,
        ),
    ] = "auto"
    kv_cache_memory_bytes: Annotated[
        int | None,
        About("Size of the KV cache.", unit=BYTES, unset="from the free memory", panel=KV),
    ] = None
    block_size: Annotated[
        int | None, About("Tokens per KV cache block.", unit=COUNT, unset="16", panel=KV)
    ] = None
    kv_eviction_config: Annotated[
        KvEviction | None,
        About(
            "Keep only some keys and values of each sequence (lossy), as JSON: "
            '\'{"method": "streaming", "budget": 1024}\'. A budget is tokens, or a share of the '
            "prompt (0.5).",
            unset="all are kept",
            panel=KV,
            since="0.3",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        About("Maximum sequences running at once.", unit=COUNT, unset="64", panel=SCHEDULING),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        About(
            "Token budget of one step.",
            unit=TOKENS,
            unset="512 on a CPU, 4096 on a GPU",
            panel=SCHEDULING,
        ),
    ] = None
    attention_backend: Annotated[
        str,
        About(
            "Attention implementation; auto chooses, and `ridgeline explain` says why.",
            metavar="NAME",
            panel=EXECUTION,
        ),
    ] = "auto"
    layer_backend: Annotated[
        str,
        About(
            "Implementation of the layers around attention; auto chooses.",
            metavar="NAME",
            panel=EXECUTION,
        ),
    ] = "auto"
    num_threads: Annotated[
        int | None,
        About(
            "CPU threads of each process.",
            unit=COUNT,
            range=Range(1, MAX_THREADS),
            unset="the available cores, divided over the processes",
            panel=EXECUTION,
        ),
    ] = None
    num_threads_decode: Annotated[
        int | None,
        About(
            "CPU threads of steps with at most 16 rows, which are mostly decode steps.",
            unit=COUNT,
            range=Range(1, MAX_THREADS),
            unset="as --num-threads",
            panel=EXECUTION,
        ),
    ] = None
    speculative_config: Annotated[
        Speculative | None,
        About(
            'Speculative decoding, as vLLM\'s JSON: \'{"method": "ngram"}\'.',
            unset="off",
            panel=EXECUTION,
        ),
    ] = None


class EngineSettings(TypedDict, total=False):
    """The keywords of `Engine.open` and of the functions that open an engine.

    Names, meaning and defaults are those of `Settings`; `model` is a separate parameter.
    """

    generation_config: str
    quantization: WeightFormat | None
    lm_head_quantization: Literal["int8", "int4", "fp8", "nvfp4", "bf16"] | None
    activations: Literal["int8", "int16", "float32"]
    enable_prefix_caching: bool
    prefix_cache_ttl_s: float | None
    prefix_pin_share: float
    kv_tier_memory: int | None
    kv_tier_dir: str | None
    kv_tier_size: int | None
    kv_tier_url: str | None
    disaggregation_mode: Literal["none", "prefill", "decode", "both"]
    disaggregation_host: str
    disaggregation_port: int
    disaggregation_transfer_backend: Literal["auto", "shm", "tcp"]
    disaggregation_peers: tuple[str, ...]
    disaggregation_timeout_s: float
    enable_chunked_prefill: bool
    async_scheduling: bool
    batching: Batching
    batch_wait_ms: float | None
    background_tokens: int | None
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    slo_throttle: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    expert_parallel_size: int
    enable_lora: bool
    lora_modules: tuple[str, ...]
    max_loras: int
    max_lora_rank: int
    context_parallel_size: int
    sequence_parallel: bool
    nnodes: int
    node_rank: int
    master_addr: str | None
    collectives: Literal["auto", "nccl", "shm", "gloo"]
    thread_plan: Literal["fixed", "auto"]
    seed: int
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    device: str
    max_model_len: int | None
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "int4"]
    kv_cache_memory_bytes: int | None
    block_size: int | None
    kv_eviction_config: KvEviction | dict[str, Any] | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    attention_backend: str
    layer_backend: str
    num_threads: int | None
    num_threads_decode: int | None
    speculative_config: Speculative | dict[str, Any] | None


PERFORMANCE_SETTINGS = (
    "enable_prefix_caching",
    "prefix_cache_ttl_s",
    "enable_chunked_prefill",
    "async_scheduling",
    "batching",
    "batch_wait_ms",
    "slo_throttle",
    "thread_plan",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "attention_backend",
    "layer_backend",
    "speculative_config",
)
"""Settings that change how fast requests are served, not the tokens, nor the memory and threads
that the engine may use."""


def with_default_performance(settings: Settings) -> Settings:
    """The same model, precision and limits, with every performance setting at its default."""
    values = {name: getattr(Settings(), name) for name in PERFORMANCE_SETTINGS}
    return msgspec.structs.replace(settings, **values)


def settings_from(values: dict[str, Any], *, where: str = "settings") -> Settings:
    """Settings from plain values; an unknown name or a wrong type is an error that names it."""
    try:
        return msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        known = ", ".join(Settings.__struct_fields__)
        raise BadInput(f"{where}: {error}", limit=f"known settings: {known}") from None


def changed(settings: Settings) -> dict[str, Any]:
    """Only what differs from the defaults; nested records as tables of the keys that were set."""
    default, values = Settings(), {}
    for name in Settings.__struct_fields__:
        value = getattr(settings, name)
        if value != getattr(default, name):
            if isinstance(value, msgspec.Struct):
                value = {k: v for k, v in msgspec.structs.asdict(value).items() if v is not None}
            values[name] = value
    return values
