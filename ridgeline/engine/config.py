"""Resolves settings: every default made explicit, each value with its derivation.

    Settings (few values) ──resolve──▶ ResolvedSettings (all values, why) ──assemble──▶ EngineParts

`ridgeline explain` prints the result. Nothing is loaded: the size of the weights comes from the
spec.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ridgeline.config.settings import PlainSettings, Settings
from ridgeline.engine.adapters.resolve import adapted_layers, adapter_memory
from ridgeline.engine.attention import choose as choose_attention
from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.attention.states import STATE_VERSIONS
from ridgeline.engine.device import choose_device
from ridgeline.engine.dtype import resolve_dtype
from ridgeline.engine.embedding_settings import EmbeddingSettings, embedding_settings
from ridgeline.engine.eviction.requirements import check_kv_eviction
from ridgeline.engine.execution.layers import choose as choose_forward
from ridgeline.engine.execution.layers import layer_backend_of
from ridgeline.engine.execution.threads import measure_rates, plan_threads
from ridgeline.engine.generation_config import read_sampling_defaults
from ridgeline.engine.kv_tiers.requirements import check_tiers
from ridgeline.engine.kv_transfer.requirements import check_disaggregation
from ridgeline.engine.parallel.resolve import (
    block_tokens,
    check_context,
    check_parallelism,
    choose_rank_layers,
    parallel_sizes,
)
from ridgeline.engine.plain_settings import derive_plain
from ridgeline.engine.quant import linear_kind
from ridgeline.engine.scheduler.background_budget import SLOWDOWN_WITHOUT_SLO, TPOT_SLO_SHARE
from ridgeline.engine.scheduler.kv.eviction import SequenceEviction
from ridgeline.engine.scheduler.kv.kv_budget import (
    KvBudgetInputs,
    fitting_model_len,
    kv_budget,
    size,
)
from ridgeline.engine.speculate.config import ResolvedSpeculation, resolve_speculation
from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware import system
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import (
    LARGE_PARAMS,
    kv_bytes_per_token,
    num_params,
    resident_weight_bytes,
    state_bytes,
)
from ridgeline.modelspec.cost.kv_layout import KvLayout, kv_layout
from ridgeline.modelspec.model import LinearSpec, ModelSpec
from ridgeline.modelspec.rewrite import (
    apply_lm_head,
    apply_quantization,
    extended,
    linears,
    with_activations,
    with_blocks_decoded,
    with_dtype,
    with_kv_dtype,
    within_context,
)
from ridgeline.modelspec.shard import ParallelSizes, ranks_of_node, shards_of
from ridgeline.records import KvEviction, SamplingDefaults

MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 4096}

NOT_BATCH_INVARIANT = (
    "; not batch-invariant: only float32 runs in the native layers, and torch's sum in an order"
    " that depends on the batch, so an answer may depend on the requests that run at the same time"
)


class ResolvedSettings(PlainSettings, frozen=True, kw_only=True):
    """The settings in use: plain ones as given, the others with every default derived.

    Names and units are those of `Settings`; `dtype` is the compute dtype. `spec` has every
    technique applied. `derivations` names the source of each value. `default_sampling` is what
    `generation_config` names, `embeddings` what the model's own files say about pooling.
    """

    dtype: str
    device: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str
    kv_cache_memory_bytes: int
    num_blocks: int
    block_size: int
    attention_backend: str
    layer_backend: str
    num_threads: int
    num_threads_decode: int
    speculative_config: ResolvedSpeculation | None
    spec: ModelSpec
    derivations: dict[str, str]
    default_sampling: SamplingDefaults = SamplingDefaults()
    embeddings: EmbeddingSettings = EmbeddingSettings()
    kv_eviction_config: KvEviction | None = None

    @property
    def parallel_sizes(self) -> ParallelSizes:
        return parallel_sizes(self)

    def values(self) -> dict[str, Any]:
        """The values of the settings, without the spec and derived records."""
        skipped = ("spec", "derivations", "default_sampling", "embeddings")
        names = (name for name in self.__struct_fields__ if name not in skipped)
        values = {name: getattr(self, name) for name in names}
        if self.background_tokens is None:
            values["background_tokens"] = "derived"
        if self.speculative_config is not None:
            values["speculative_config"] = msgspec.to_builtins(self.speculative_config)
        if self.kv_eviction_config is not None:
            values["kv_eviction_config"] = self.kv_eviction_config.as_dict()
        return values


class Models(msgspec.Struct, frozen=True):
    """Memory of the model and its draft model together; states count with the weights."""

    weight_bytes: int
    kv_bytes_per_token: int
    draft_kv_bytes: int
    layout: KvLayout

    @staticmethod
    def of(
        spec: ModelSpec,
        speculation: ResolvedSpeculation | None,
        max_num_seqs: int,
        sizes: ParallelSizes,
        num_nodes: int = 1,
    ) -> Models:
        """The memory of all ranks of node 0, which share the machine."""
        states = STATE_VERSIONS * state_bytes(spec) * max_num_seqs
        extra = (
            (speculation.weight_bytes, speculation.kv_bytes_per_token) if speculation else (0, 0)
        )
        shards = shards_of(spec, sizes)[: len(ranks_of_node(sizes, num_nodes, 0))]
        whole_bytes = kv_bytes_per_token(spec)
        kv_bytes = sum(map(kv_bytes_per_token, shards)) // sizes.context
        layout = kv_layout(spec)
        if whole_bytes:
            position_bytes = layout.position_bytes * kv_bytes // whole_bytes
            layout = msgspec.structs.replace(layout, position_bytes=position_bytes)
        return Models(
            int(sum(map(resident_weight_bytes, shards))) + states + extra[0],
            kv_bytes + extra[1],
            extra[1],
            layout,
        )


def _models(
    settings: Settings,
    spec: ModelSpec,
    device: torch.device,
    speculation: ResolvedSpeculation | None,
    max_num_seqs: int,
    dtype: torch.dtype,
    why: dict[str, str],
) -> Models:
    """The memory of the models, and of adapters, which count with the weights."""
    sizes = parallel_sizes(settings)
    models = Models.of(spec, speculation, max_num_seqs, sizes, settings.nnodes)
    reserved = adapter_memory(settings, spec, device, dtype, why)
    return msgspec.structs.replace(models, weight_bytes=models.weight_bytes + reserved)


def _check_kv_blocks(settings: Settings, spec: ModelSpec) -> None:
    """Check the options of KV blocks outside the cache."""
    check_tiers(settings, spec)
    check_disaggregation(settings, spec)


def resolve(settings: Settings, memory_bytes: int | None = None) -> ResolvedSettings:
    """Derive every value, with `memory_bytes` in place of this machine's memory if given. Raises
    BadModel, BadInput, CannotRun or DoesNotFit.
    """
    why: dict[str, str] = {}
    device = choose_device(settings.device, why)
    spec, dtype = _spec(settings, device, why)
    check_parallelism(settings, spec, device, why)
    _check_kv_blocks(settings, spec)
    default_sampling = _default_sampling(settings, why)
    max_num_seqs = _max_num_seqs(settings, spec, device, why)
    block_size = _asked_or(settings, "block_size", block_tokens(settings, kv_layout(spec)), why)
    max_model_len = _max_model_len(settings, spec, why)
    speculation = resolve_speculation(settings, spec, max_model_len, why)
    _kv_eviction(settings, spec, speculation, block_size, why)
    models = _models(settings, spec, device, speculation, max_num_seqs, dtype, why)
    max_num_batched_tokens = _max_num_batched_tokens(settings, device, why)
    inputs = _kv_inputs(
        models,
        device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        max_run_tokens=max_num_batched_tokens if settings.enable_chunked_prefill else max_model_len,
        requested_bytes=settings.kv_cache_memory_bytes,
        memory_bytes=memory_bytes,
    )
    is_free = settings.max_model_len is None and settings.kv_cache_memory_bytes is None
    if is_free and (max_model_len := fitting_model_len(inputs)) < inputs.max_model_len:
        why["max_model_len"] = (
            f"lowered from the model's {inputs.max_model_len:,} to what fits the KV cache; "
            "set --max-model-len or --kv-cache-memory-bytes to change it"
        )
        speculation = resolve_speculation(settings, spec, max_model_len, why)
        inputs = msgspec.structs.replace(inputs, max_model_len=max_model_len)
    budget = kv_budget(inputs)
    _background(settings, why)
    why |= {"kv_cache_memory_bytes": budget.why, "num_blocks": budget.num_blocks_why}
    site = AttentionSite.of(spec, device, dtype, block_size)
    check_context(settings, site, max_model_len)
    backend, reasons = choose_attention(settings.attention_backend, site)
    why["attention_backend"] = "; ".join(reasons)
    return ResolvedSettings(
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_dtype=spec.kv_dtype,
        kv_cache_memory_bytes=budget.nbytes,
        num_blocks=budget.num_blocks,
        block_size=block_size,
        attention_backend=backend,
        layer_backend=_layer_backend(settings, spec, device, dtype, why),
        **_threads(settings, why),
        speculative_config=speculation,
        kv_eviction_config=settings.kv_eviction_config,
        spec=spec,
        derivations=why | derive_plain(settings, why),
        default_sampling=default_sampling,
        embeddings=embedding_settings(settings.model),
        **{name: getattr(settings, name) for name in PlainSettings.__struct_fields__},
    )


def _kv_eviction(
    settings: Settings,
    spec: ModelSpec,
    speculation: ResolvedSpeculation | None,
    block_size: int,
    why: dict[str, str],
) -> None:
    """Check the eviction policy of requests that name none, and state its effect."""
    policy = settings.kv_eviction_config
    if policy is None or not policy.evicts:
        why["kv_eviction_config"] = "every key and value is kept"
        return
    check_kv_eviction(policy, spec, speculation)
    SequenceEviction.of(policy, spec.max_positions, block_size)  # whether the budget has room
    unit = "tokens" if isinstance(policy.budget, int) else "of the prompt"
    why["kv_eviction_config"] = (
        f"as requested: lossy, {policy.method} keeps {policy.budget} {unit} of each sequence"
    )


def _default_sampling(settings: Settings, why: dict[str, str]) -> SamplingDefaults:
    defaults = read_sampling_defaults(settings.model, settings.generation_config)
    why["generation_config"] = f"sampling defaults: {defaults}"
    return defaults


def _background(settings: Settings, why: dict[str, str]) -> None:
    """Derive the background tokens of a step, and state their effect."""
    tokens = settings.background_tokens
    if tokens is None:
        with_slo = f"{TPOT_SLO_SHARE:g} of the TPOT SLO"
        without = f"{SLOWDOWN_WITHOUT_SLO:g} times its length without background tokens"
        limit = f"a mixed step takes at most {with_slo} (without an SLO: {without})"
        why["background_tokens"] = f"derived while serving, from measured step times: {limit}"
        return
    effect = f"a step with interactive requests computes at most {tokens} background tokens"
    if tokens == 0:
        effect = "background requests pause while interactive requests are served"
    why["background_tokens"] = f"as requested: {effect}"


def _asked_or(settings: Settings, name: str, default: int, why: dict[str, str]) -> int:
    asked = getattr(settings, name)
    why[name] = "default" if asked is None else "as requested"
    return int(default if asked is None else asked)


def _max_num_seqs(
    settings: Settings, spec: ModelSpec, device: torch.device, why: dict[str, str]
) -> int:
    """The number of slots; states of recurrent layers take at most a quarter of the memory."""
    each = STATE_VERSIONS * state_bytes(spec)
    if not each:
        return _asked_or(settings, "max_num_seqs", MAX_NUM_SEQS, why)
    why["enable_prefix_caching"] = "no prefix hits: recurrent layers keep one state per sequence"
    left = max(0, _memory(device)[1] - int(resident_weight_bytes(spec)))
    num = max(1, min(MAX_NUM_SEQS, left // 4 // each))
    num = _asked_or(settings, "max_num_seqs", num, why)
    source = "as requested" if settings.max_num_seqs is not None else "derived"
    why["max_num_seqs"] = f"{source}: each sequence keeps {size(each)} of states"
    return num


def _spec(
    settings: Settings, device: torch.device, why: dict[str, str]
) -> tuple[ModelSpec, torch.dtype]:
    """The spec as it will run, and the compute dtype."""
    stored = load_spec(settings.model)
    if settings.max_model_len is not None:
        trained, stored = stored.max_positions, extended(stored, settings.max_model_len)
        if stored.max_positions > trained:
            why["max_model_len"] = f"as requested: {trained:,} tokens, extended by linear scaling"
    stored = within_context(stored, settings.max_model_len or stored.max_positions)
    stored = stored if device.type == "cpu" else with_blocks_decoded(stored)
    dtype, why["dtype"] = resolve_dtype(settings.dtype, stored.stored_dtype, device)
    spec = _formats(settings, stored, device, dtype, why)
    if settings.dtype == "auto" and dtype != torch.float32:
        exact = _formats(settings, stored, device, torch.float32, exact_why := dict(why))
        if _runs_native(exact, device):
            why |= exact_why
            why["dtype"] = (
                f"stored as {stored.stored_dtype}, computed in float32, as the native layers do;"
                f" --dtype {stored.stored_dtype} would take torch's"
            )
            spec, dtype = exact, torch.float32
    if settings.dtype == "auto":
        spec = _kept_as_stored(spec, device, why)
    if settings.kv_cache_dtype == "auto":
        spec = _kv_as_stored(spec, device, why)
    else:
        spec = with_kv_dtype(spec, settings.kv_cache_dtype)
        why["kv_cache_dtype"] = "as requested"
    if device.type == "cpu" and dtype != torch.float32:
        why["dtype"] += NOT_BATCH_INVARIANT
    return spec, dtype


def _formats(
    settings: Settings,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    why: dict[str, str],
) -> ModelSpec:
    """The spec with compute dtype `dtype` and its linears in the requested formats."""
    spec = with_dtype(spec, str(dtype).removeprefix("torch."))
    if settings.quantization is not None:
        spec = apply_quantization(spec, settings.quantization)
        why["quantization"] = f"as requested: {_kernel(spec.layers[-1].mlp.gate, device)}"
    spec, why["lm_head_quantization"] = _lm_head(settings, spec, device)
    if settings.activations == "int8":
        if all(linear.format.kind == "dense" for linear in linears(spec).values()):
            why["activations"] = "no effect: the weights are not quantised"
        return spec
    if device.type != "cpu":
        raise CannotRun(
            "activations of more than 8 bits are only supported on the CPU",
            value=f"--activations {settings.activations} on {device}",
            fix="use --device cpu, or leave it out",
        )
    return with_activations(spec, settings.activations)


def _kept_as_stored(spec: ModelSpec, device: torch.device, why: dict[str, str]) -> ModelSpec:
    """Keep the weights of a large bfloat16 model in bfloat16, whatever the compute dtype.

    They have the same values in half the bytes.
    """
    dense = all(linear.format.kind == "dense" for linear in linears(spec).values())
    widened = (spec.stored_dtype, spec.dtype, device.type) == ("bfloat16", "float32", "cpu")
    if not dense or not widened or num_params(spec) < LARGE_PARAMS:
        return spec
    kept = apply_quantization(spec, "bf16")
    if not _runs_native(kept, device):
        return spec
    why["quantization"] = (
        "not requested: weights stay in memory in bfloat16, as stored, without loss"
        " (--dtype float32 widens them)"
    )
    return kept


def _kv_as_stored(spec: ModelSpec, device: torch.device, why: dict[str, str]) -> ModelSpec:
    """Keep keys and values of a large 16-bit model in its dtype, whatever the compute dtype.

    A model that fits the caches of a CPU gains nothing by it, and keeps the compute dtype.
    """
    narrow = spec.stored_dtype in ("bfloat16", "float16") and spec.dtype == "float32"
    if not narrow or num_params(spec) < LARGE_PARAMS:
        why["kv_cache_dtype"] = "the dtype of the computation"
        return spec
    kept = with_kv_dtype(spec, spec.stored_dtype)
    if not _runs_native(kept, device):
        why["kv_cache_dtype"] = "the dtype of the computation"
        return spec
    why["kv_cache_dtype"] = (
        f"the model's own dtype: half the bytes of {spec.dtype}"
        f" (--kv-cache-dtype {spec.dtype} widens it)"
    )
    return kept


def _is_dense(spec: ModelSpec) -> bool:
    return spec.layers[-1].mlp.gate.format.kind == "dense"


def _runs_native(spec: ModelSpec, device: torch.device) -> bool:
    return not layer_backend_of("native").why_not(spec, device, torch.float32)


def _lm_head(settings: Settings, spec: ModelSpec, device: torch.device) -> tuple[ModelSpec, str]:
    """The LM head in the requested format; by default, with quantised layers, as stored."""
    asked, dense = settings.lm_head_quantization, spec.lm_head.format.kind == "dense"
    if asked is not None:
        spec = apply_lm_head(spec, asked)
        return spec, f"as requested: {_kernel(spec.lm_head, device)}"
    if not dense or _is_dense(spec):
        return spec, "as it is stored" if dense else _kernel(spec.lm_head, device)
    if (spec.stored_dtype, spec.dtype, device.type) == ("bfloat16", "float32", "cpu"):
        return apply_lm_head(spec, "bf16"), "bfloat16 as stored in the checkpoint, without loss"
    return spec, "as it is stored"


def _kernel(linear: LinearSpec, device: torch.device) -> str:
    """The kernel for a linear of this format. Raises CannotRun if none can run."""
    describe = getattr(linear_kind(linear.format.kind), "describe", None)
    return linear.format.kind if describe is None else str(describe(linear, device))


def _layer_backend(
    settings: Settings,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    why: dict[str, str],
) -> str:
    if settings.enable_lora:
        asked = settings.layer_backend
        name, why["layer_backend"] = adapted_layers(asked, spec, device, dtype)
        return name
    sizes = parallel_sizes(settings)
    if sizes.num_ranks > 1:
        backend, reasons = choose_rank_layers(settings.layer_backend, spec, sizes, device, dtype)
    else:
        backend, reasons = choose_forward(settings.layer_backend, spec, device, dtype)
    why["layer_backend"] = "; ".join(reasons)
    return backend


def _max_model_len(settings: Settings, spec: ModelSpec, why: dict[str, str]) -> int:
    asked = settings.max_model_len
    if asked is None:
        why["max_model_len"] = "the model's context"
        return spec.max_positions
    if asked > spec.max_positions:
        kinds = {layer.attention.rope.kind for layer in spec.layers}
        reason = (
            ", beyond which dynamic rope scaling rotates every key again as a sequence grows, and "
            "cached keys stay as they are"
        )
        raise BadInput(
            f"--max-model-len exceeds the model's context{reason if 'dynamic' in kinds else ''}",
            value=asked,
            limit=spec.max_positions,
            fix=f"use --max-model-len {spec.max_positions} or less",
        )
    why.setdefault("max_model_len", "as requested")
    return asked


def _max_num_batched_tokens(settings: Settings, device: torch.device, why: dict[str, str]) -> int:
    default = MAX_NUM_BATCHED_TOKENS[device.type]
    tokens = _asked_or(settings, "max_num_batched_tokens", default, why)
    if settings.max_num_batched_tokens is None:
        why["max_num_batched_tokens"] = (
            f"default on {device.type}: a prefill chunk delays decodes by one step of this size"
        )
    return tokens


def _threads(settings: Settings, why: dict[str, str]) -> dict[str, Any]:
    cores = system.cores()
    num_ranks = len(ranks_of_node(parallel_sizes(settings), settings.nnodes, 0))
    if num_ranks > 1:
        cores = msgspec.structs.replace(cores, quota=max(1.0, cores.usable / num_ranks))
    plan = plan_threads(settings, cores, measure_rates)
    why |= {"num_threads": plan.why, "num_threads_decode": plan.why_decode}
    return {"num_threads": plan.num_threads, "num_threads_decode": plan.num_threads_decode}


def _kv_inputs(
    models: Models, device: torch.device, *, memory_bytes: int | None, **limits: Any
) -> KvBudgetInputs:
    total, available = (memory_bytes, memory_bytes) if memory_bytes else _memory(device)
    return KvBudgetInputs(
        weight_bytes=models.weight_bytes,
        kv_bytes_per_token=models.kv_bytes_per_token,
        draft_kv_bytes=models.draft_kv_bytes,
        layout=models.layout,
        memory_bytes=total,
        available_bytes=available,
        device=device.type,
        **limits,
    )


def _memory(device: torch.device) -> tuple[int, int]:
    """(total, available) bytes of the memory that will hold weights and cache."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    found = system.memory()
    return found.total_bytes, found.available_bytes
