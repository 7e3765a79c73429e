"""Builds the engine of a twin: the parts of a real one, with the modelled runner."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import msgspec
from msgspec.structs import replace

from ridgeline.engine.build import EngineParts, make_masks_of, make_scheduler
from ridgeline.engine.config import ResolvedSettings
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.tokenization import Tokenizer, load_tokenizer
from ridgeline.errors import BadInput, BadModel, DoesNotFit
from ridgeline.hardware.catalogue import Accelerator, find_accelerator
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.serving_formats import parse_kv_dtype, parse_weight_dtype
from ridgeline.modelspec.families.shapes import known_shapes, shape_of_repository
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import extended
from ridgeline.plan.simulate.kv_tiers import TierClock, TierSizes, add_tiers
from ridgeline.plan.step_time.memory import MemoryBudget, MemoryLimits, memory_budget, with_drafter
from ridgeline.plan.step_time.operating_point import resolve_limits
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.replica import Replica, build_replica
from ridgeline.plan.step_time.simulated import HostedStepTimes
from ridgeline.plan.step_time.speculation import SpeculationModel
from ridgeline.records.trace import TWIN_OF
from ridgeline.twin.config import STAND_IN, TwinConfig
from ridgeline.twin.drafters import drafter_memory, drafter_replica
from ridgeline.twin.engine import TwinEngine
from ridgeline.twin.masked_choice import MaskedChoice
from ridgeline.twin.runner import ModelledRunner, ModelledTiers
from ridgeline.twin.synthetic_model import SyntheticModel, mix, ordinary_tokens

HOST_BYTES_S = 20e9
"""Copies between a device and host memory, of blocks in pieces over PCIe 4: assumed."""

NOISE_NATS = {"float8_e4m3": 0.03, "int8": 0.03, "mxfp4": 0.15, "int4": 0.12}
"""Standard deviation of a format's noise on log-probabilities: assumed, of the usual order."""


class TwinModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a configuration comes to: the placed model, its memory, and the resolved limits.

    `offload_bytes`: host memory for what the prefix cache of the replica evicts.
    """

    replica: Replica
    memory: MemoryBudget
    offload_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def num_kv_tokens(self) -> int:
        return self.memory.kv_tokens


def twin_spec(model: str) -> ModelSpec:
    """The spec of a published shape or a model directory, also by the repository of a tuned model.

    `meta-llama/Llama-3.1-8B-Instruct` is the shape llama-3.1-8b. Of a repository without such a
    shape, config.json is read from the Hugging Face Hub. Raises UserError.
    """
    name = None if Path(model).exists() else shape_of_repository(model)
    return load_planning_spec(name or model)


def plan_twin(config: TwinConfig, catalogue: Mapping[str, Accelerator] | None = None) -> TwinModel:
    """Place the model on its devices. Raises UserError if it cannot run there or does not fit."""
    rows = None if catalogue is None else dict(catalogue)
    replica = build_replica(
        twin_spec(config.model),
        find_accelerator(config.device, rows),
        Layout(tp=config.tp, ep=config.ep, cp=config.cp, sp=config.sp),
        weight_dtype=None
        if config.weight_dtype is None
        else parse_weight_dtype(config.weight_dtype),
        kv_dtype=None if config.kv_dtype is None else parse_kv_dtype(config.kv_dtype),
    )
    seqs, tokens = resolve_limits(replica, config.max_num_seqs, config.max_num_batched_tokens)
    memory = memory_budget(
        replica,
        MemoryLimits(
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            utilization=config.utilization,
            block_size=config.block_size,
        ),
    )
    if config.kv_tokens is None:
        memory = _with_drafter(config, replica, memory)
    elif config.kv_tokens != memory.kv_tokens:
        blocks = config.kv_tokens // config.block_size * replica.cost.layout.num_groups
        memory = replace(memory, kv_tokens=config.kv_tokens, kv_blocks=blocks)
    blocks = memory.kv_tokens // config.block_size
    if not blocks:
        raise DoesNotFit(
            f"the weights leave no memory for the KV cache on {replica.layout.num_devices} x "
            f"{replica.device.name}",
            value=f"weights {memory.weight_bytes / 1e9:.1f} GB per device",
            limit=f"{memory.usable_bytes / 1e9:.1f} GB usable",
            fix="use more devices, a larger memory share, or a smaller weight format",
        )
    asked, capacity = _asked_len(config, replica.spec), blocks * config.block_size
    if asked is not None and asked > capacity:
        raise DoesNotFit(
            "one request of the maximum length does not fit the KV cache",
            value=f"{asked:,} tokens",
            limit=f"{capacity:,} tokens",
            fix="lower the maximum length, or use more devices or a smaller format",
        )
    return TwinModel(
        replica=replica,
        memory=memory,
        offload_bytes=config.offload_bytes
        or int(config.offload_ratio * memory.kv_tokens * replica.cost.kv_bytes_per_token),
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=asked or min(replica.spec.max_positions, capacity),
    )


def _asked_len(config: TwinConfig, spec: ModelSpec) -> int | None:
    """The maximum length of a sequence that is asked for. Raises BadInput beyond the model's
    context, where the server is not one that stops there."""
    asked = config.max_model_len
    if asked is None or asked <= extended(spec, asked).max_positions:
        return asked
    if config.caps_context:
        return spec.max_positions
    raise BadInput(
        f"the maximum length exceeds the context of {spec.name}",
        value=f"{asked:,} tokens",
        limit=f"{spec.max_positions:,} tokens",
        fix="lower it, or leave it out",
    )


def _placed_drafter(config: TwinConfig, replica: Replica) -> Replica | None:
    """The drafter on the model's devices; None without one that computes."""
    drafter = config.drafter
    draft_spec = twin_spec(drafter.checkpoint) if drafter.kind == "model" else None
    return drafter_replica(drafter, replica, draft_spec)


def _with_drafter(config: TwinConfig, replica: Replica, memory: MemoryBudget) -> MemoryBudget:
    """What is left for the cache where a drafter has its weights and its own cache."""
    placed = _placed_drafter(config, replica)
    if placed is None:
        return memory
    taken = drafter_memory(config.drafter, replica, placed)
    share = taken.kv_bytes_per_token / replica.cost.kv_bytes_per_token
    return with_drafter(memory, taken.weight_bytes, share, replica.cost.layout, config.block_size)


def tiers_of(config: TwinConfig, model: TwinModel) -> TierSizes:
    """Host memory below the prefix cache of one replica, whose devices copy at the same time."""
    if not model.offload_bytes:
        return TierSizes()
    return TierSizes(
        memory_bytes=model.offload_bytes,
        memory_bytes_s=HOST_BYTES_S * model.replica.layout.num_devices,
    )


def block_bytes_of(config: TwinConfig, model: TwinModel) -> int:
    """Bytes of one block of the cache in all devices of a replica."""
    layout, copies = model.replica.cost.layout, model.replica.kv_copies
    return int(layout.block_bytes(config.block_size) * copies)


def open_engine(
    config: TwinConfig,
    model: TwinModel,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[TwinEngine, ModelledRunner]:
    """One replica, ready to serve. The engine's clock runs in real seconds; `sleep` waits on it."""
    tokenizer, spec = _tokenizer_of(config.model, model.replica.spec)
    resolved = resolved_settings(config, model, spec)
    masks = make_masks_of(tokenizer, spec)
    words = ordinary_tokens(tokenizer, spec.vocab_size)
    scheduler = make_scheduler(resolved)
    add_tiers(scheduler, tiers_of(config, model), block_bytes_of(config, model))
    runner = ModelledRunner(
        step_times_of(config, model.replica),
        SyntheticModel(
            words,
            spec.eos_token_ids,
            config.seed,
            noise_nats=_noise_nats(config, model.replica),
            format_seed=mix(*f"{config.weight_dtype} {config.kv_dtype}".encode()),
        ),
        MaskedChoice(masks, tokenizer, spec.vocab_size, spec.eos_token_ids),
        speed=config.speed,
        clock=clock,
        sleep=sleep,
        transfer_s=TierClock(scheduler).transfer_s,
    )
    parts = EngineParts(
        tokenizer=tokenizer,
        scheduler=scheduler,
        runner=cast(TorchRunner, runner),  # the engine only runs plans with it
        masks=masks,
        tiers=ModelledTiers(model.offload_bytes),
        weight_bytes=int(model.memory.weight_bytes * model.replica.layout.num_devices),
    )
    overhead_s = model.replica.efficiency.first_s / config.speed
    return TwinEngine(resolved, parts, overhead_s=overhead_s, clock=clock), runner


def _noise_nats(config: TwinConfig, replica: Replica) -> float:
    """The configured noise, or what the formats are assumed to lose (`NOISE_NATS`)."""
    if config.noise_nats is not None:
        return config.noise_nats
    formats = (replica.weight_dtype, replica.kv_dtype)
    return max(NOISE_NATS.get(name, 0.0) for name in formats)


def _tokenizer_of(model: str, spec: ModelSpec) -> tuple[Tokenizer, ModelSpec]:
    """The model's tokenizer; that of `STAND_IN`, with its ends, if the model is not here."""
    try:
        if model not in known_shapes():
            return load_tokenizer(model), spec
    except BadModel:
        pass
    stand_in = load_spec(STAND_IN)
    if spec.vocab_size < stand_in.vocab_size:
        spec = replace(spec, vocab_size=stand_in.vocab_size)
    return load_tokenizer(STAND_IN), replace(spec, eos_token_ids=stand_in.eos_token_ids)


def step_times_of(config: TwinConfig, replica: Replica) -> HostedStepTimes:
    """The step times of one replica, with its host and its speculation."""
    drafts, speculation = config.num_speculative_tokens, None
    if drafts:
        speculation = SpeculationModel(
            num_tokens=drafts,
            acceptance=config.acceptance,
            draft=_placed_drafter(config, replica),
        )
    return HostedStepTimes(replica, speculation, config.host)


def resolved_settings(config: TwinConfig, model: TwinModel, spec: ModelSpec) -> ResolvedSettings:
    """The settings as the engine's scheduler takes them; execution is that of the twin."""
    replica, memory = model.replica, model.memory
    where = f"{TWIN_OF}{config.description}"
    derived = f"modelled: {memory.kv_tokens:,} tokens at {config.utilization:g} of the memory"
    return ResolvedSettings(
        model=config.model,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        prefix_cache_ttl_s=config.prefix_cache_ttl_s,
        prefix_pin_share=config.prefix_pin_share,
        background_tokens=config.background_tokens,
        kv_eviction_config=config.kv_eviction,
        batching=config.batching,  # type: ignore[arg-type]  # checked by make_policy
        batch_wait_ms=config.batch_wait_ms,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        seed=config.seed,
        dtype=replica.compute_dtype,
        device=where,
        max_model_len=model.max_model_len,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        kv_cache_dtype=replica.kv_dtype,
        kv_cache_memory_bytes=int(memory.kv_bytes),
        num_blocks=memory.kv_blocks,
        block_size=config.block_size,
        attention_backend="modelled",
        layer_backend="modelled",
        num_threads=1,
        num_threads_decode=1,
        speculative_config=None,
        spec=spec,
        derivations={"device": where, "num_blocks": derived},
    )
