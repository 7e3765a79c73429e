"""Builds the parts of an engine from resolved settings: the only place that connects them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from ridgeline.engine.adapters.registry import AdapterRegistry
from ridgeline.engine.adapters.resolve import parse_lora_modules
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.config import ResolvedSettings
from ridgeline.engine.dtype import DTYPES
from ridgeline.engine.execution.graphs.ahead import CudaQueue, StepsAhead, why_no_steps_ahead
from ridgeline.engine.execution.graphs.decode import make_decode_graphs
from ridgeline.engine.execution.graphs.pieces import make_piecewise_graphs
from ridgeline.engine.execution.graphs.warm_up import warm_up
from ridgeline.engine.execution.page_prefetch import PagePrefetcher
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.execution.threads import StepThreads
from ridgeline.engine.kv_tiers.block_tiers import BlockTiers, NoBlockTiers, build_block_tiers
from ridgeline.engine.kv_transfer.transfers import (
    NoTransfers,
    SharedSlots,
    Transfers,
    build_transfers,
)
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.parallel.devices import choose_exchange
from ridgeline.engine.parallel.exchange.connect import make_collectives
from ridgeline.engine.parallel.group import NO_PROCESSES, Processes, RankGroup
from ridgeline.engine.parallel.messages import rank_config
from ridgeline.engine.parallel.rank import load_model
from ridgeline.engine.parallel.runner import make_runner
from ridgeline.engine.scheduler.admission.limits import SchedulerLimits
from ridgeline.engine.scheduler.batching import make_policy, seconds_of
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.prefix_cache import BlockCache, NoPrefixCache, PrefixCache
from ridgeline.engine.scheduler.kv.prefix_pins import PrefixPins
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.engine.scheduler.speculation.base import DraftProposer
from ridgeline.engine.speculate.build import build_speculation
from ridgeline.engine.speculate.config import ResolvedSpeculation
from ridgeline.engine.speculate.drafters.target_model import TargetModel
from ridgeline.engine.structured_output import make_masks
from ridgeline.engine.structured_output.base import TokenMasks
from ridgeline.engine.tokenization import (
    HfTokenizer,
    Tokenizer,
    check_tokenizer,
    load_tokenizer,
)
from ridgeline.errors import CannotRun
from ridgeline.modelspec.cost.kv_cache import has_states
from ridgeline.modelspec.cost.kv_layout import kv_layout
from ridgeline.modelspec.cost.step import prompt_logprob_tokens
from ridgeline.modelspec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of a working engine; `weight_bytes` is the memory that all weights occupy."""

    tokenizer: Tokenizer
    scheduler: Scheduler
    runner: TorchRunner
    masks: TokenMasks
    weight_bytes: int
    processes: Processes = NO_PROCESSES
    tiers: BlockTiers = field(default_factory=NoBlockTiers)
    transfers: Transfers = field(default_factory=NoTransfers)
    adapters: AdapterRegistry | None = None


def assemble(
    resolved: ResolvedSettings, clock: Callable[[], float] = time.perf_counter
) -> EngineParts:
    """Load weights and tokenizer and build the parts. Raises BadModel, BadInput or CannotRun.

    Cheap checks come before the weights are loaded.
    """
    tokenizer = load_tokenizer(resolved.model)
    check_tokenizer(tokenizer, resolved.spec.vocab_size)
    if resolved.parallel_sizes.num_ranks > 1:
        if resolved.async_scheduling:
            raise no_async_scheduling("several ranks compute a step")
        return assemble_ranks(resolved, tokenizer, clock)
    target = cache(lambda: _target(resolved))
    speculation = build_speculation(resolved.speculative_config, tokenizer, resolved, clock, target)
    scheduler = make_scheduler(resolved, speculation.drafts)
    decoder, kv = target().decoder, target().cache
    scheduler.pool.watch_high_water(PagePrefetcher(kv).extend_to)
    masks = make_masks_of(tokenizer, resolved.spec)
    attention, verifier = target().attention(), speculation.verifier
    adapters = _adapters(resolved, decoder)
    threads = StepThreads(resolved.num_threads, resolved.num_threads_decode)
    observer = speculation.observer
    runner = TorchRunner(decoder, kv, attention, masks, verifier, observer, threads)
    graphs = make_decode_graphs(decoder, attention, resolved.max_model_len, adapters)
    if adapters is not None:  # prompts run eagerly: their adapters are chosen on the host
        runner.use_adapters(adapters)
    else:
        pieces = make_piecewise_graphs(
            decoder, attention, resolved.max_model_len, resolved.max_num_batched_tokens
        )
        if pieces is not None:
            runner.use_pieces(pieces)
    if graphs is not None:
        runner.use_graphs(graphs)
        graphs.warm_up_s = warm_up(
            decoder, attention, graphs, resolved.max_num_seqs, kv.num_blocks - 1
        )
    if resolved.async_scheduling:
        use_steps_ahead(resolved, runner, scheduler)
    speculation.calibrate(runner)
    num_bytes = decoder.nbytes + speculation.weight_bytes
    shared = SharedSlots(resolved)
    tiers = build_block_tiers(resolved, scheduler, kv, shared.allocate)
    num_bytes += sum(own.nbytes for own in adapters.loaded) if adapters else 0
    return EngineParts(
        tokenizer,
        scheduler,
        runner,
        masks,
        num_bytes,
        tiers=tiers,
        transfers=build_transfers(resolved, kv, tiers, shared.memory),
        adapters=adapters,
    )


def use_steps_ahead(resolved: ResolvedSettings, runner: TorchRunner, scheduler: Scheduler) -> None:
    """Launch decode steps ahead. Raises CannotRun with the reason where they cannot be."""
    tiers = (resolved.kv_tier_memory, resolved.kv_tier_dir, resolved.kv_tier_url)
    moves = {
        "a tier of the KV cache": any(tiers),
        "a prefill or decode server": resolved.disaggregation_mode != "none",
        "an eviction policy": resolved.kv_eviction_config,
    }
    reason = why_no_steps_ahead(
        runner.graphs,
        runner.describe_graphs(),
        drafts=resolved.speculative_config is not None,
        moves_blocks=next((name for name, value in moves.items() if value), ""),
    )
    if reason is not None:
        raise no_async_scheduling(reason)
    assert runner.graphs is not None
    runner.use_steps_ahead(StepsAhead(runner.graphs, CudaQueue(), resolved.block_size))
    scheduler.draft_scheduler.reserves_ahead = True


def no_async_scheduling(reason: str) -> CannotRun:
    """The error of --async-scheduling where it cannot run."""
    return CannotRun(
        f"--async-scheduling cannot run here: {reason}", fix="leave out --async-scheduling"
    )


def _adapters(resolved: ResolvedSettings, decoder: Decoder) -> AdapterRegistry | None:
    """The adapters that were named, loaded over the decoder; None without --enable-lora."""
    if not resolved.enable_lora:
        return None
    sizes = resolved.max_loras, resolved.max_lora_rank
    registry = AdapterRegistry(decoder, *sizes, stacked=decoder.device.type == "cuda")
    for name, directory in parse_lora_modules(resolved.lora_modules).items():
        registry.load(name, directory)
    return registry


def assemble_ranks(
    resolved: ResolvedSettings, tokenizer: Tokenizer, clock: Callable[[], float]
) -> EngineParts:
    """The parts of an engine whose model is computed by several processes.

    The others load their parts of the weights while this one loads that of rank 0.
    """
    exchange, _ = choose_exchange(resolved, resolved.parallel_sizes, torch.device(resolved.device))
    group = RankGroup(rank_config(resolved), shares_memory=exchange == "shm")
    try:
        config = group.config
        host = None if config.address is None else config.address.host
        collectives = make_collectives(
            config.shard, config.timeout_s, config.segment, host, config.device
        )
        model = cache(lambda: load_model(group.config, collectives))
        drafts = resolved.speculative_config
        speculation = build_speculation(
            drafts, tokenizer, resolved, clock, partial(_no_target, drafts)
        )
        scheduler = make_scheduler(resolved, speculation.drafts)
        num_bytes = model().decoder.nbytes + speculation.weight_bytes
        scheduler.pool.watch_high_water(PagePrefetcher(model().cache).extend_to)
        num_bytes += group.wait_until_loaded()
        collectives.connect(config.store)
        masks = make_masks_of(tokenizer, resolved.spec)
        runner = make_runner(
            model(),
            group,
            masks,
            speculation.verifier,
            StepThreads(resolved.num_threads, resolved.num_threads_decode),
        )
        speculation.calibrate(runner)
    except BaseException:
        group.close()
        raise
    return EngineParts(tokenizer, scheduler, runner, masks, num_bytes, processes=group)


def _no_target(speculation: ResolvedSpeculation | None) -> TargetModel:
    method = "speculative decoding" if speculation is None else speculation.method
    raise CannotRun(
        f"drafting with {method!r} reads the target model's layers, which several ranks hold",
        fix="use the method ngram or suffix, or one process",
    )


def _target(resolved: ResolvedSettings) -> TargetModel:
    """The target model: weights and KV cache."""
    device, dtype = torch.device(resolved.device), DTYPES[resolved.dtype]
    decoder = load_decoder(
        resolved.model,
        resolved.spec,
        device=device,
        compute_dtype=dtype,
        seed=resolved.seed,
        max_model_len=resolved.max_model_len,
        layer_backend=resolved.layer_backend,
    )
    # On a GPU, rows of padding write to one block that no sequence has.
    num_padding_blocks = 1 if device.type == "cuda" else 0
    kv = KvCache.allocate(
        resolved.spec,
        resolved.num_blocks + num_padding_blocks,
        resolved.block_size,
        dtype,
        device,
        kv_format(resolved.kv_cache_dtype, device),
        resolved.max_num_seqs,
        kv_layout(resolved.spec),
    )
    return TargetModel(decoder, kv, resolved.attention_backend, resolved.layer_backend)


def make_masks_of(tokenizer: Tokenizer, spec: ModelSpec) -> TokenMasks:
    """The masks for grammars over a tokenizer's vocabulary."""
    text = tokenizer.inner.to_str if isinstance(tokenizer, HfTokenizer) else None
    return make_masks(text, spec.vocab_size, spec.eos_token_ids)


def make_scheduler(resolved: ResolvedSettings, drafts: DraftProposer | None = None) -> Scheduler:
    """The scheduler with its batching policy, block pool, prefix cache and draft proposer."""
    pool = BlockPool(resolved.num_blocks, resolved.block_size)
    limits = SchedulerLimits(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        chunked_prefill=resolved.enable_chunked_prefill,
        background_tokens=resolved.background_tokens,
        shares_prefixes=not has_states(resolved.spec),
        kv_layout=kv_layout(resolved.spec),
        kv_eviction=resolved.kv_eviction_config,
        prompt_logprob_tokens=prompt_logprob_tokens(resolved.spec),
    )
    return Scheduler(
        limits,
        make_policy(resolved.batching, wait_s=seconds_of(resolved.batch_wait_ms)),
        pool,
        _prefix_cache(resolved, pool),
        eos_token_ids=resolved.spec.eos_token_ids,
        seed=resolved.seed,
        drafts=drafts,
    )


def _prefix_cache(resolved: ResolvedSettings, pool: BlockPool) -> BlockCache:
    if not resolved.enable_prefix_caching or has_states(resolved.spec):
        return NoPrefixCache()
    layout = kv_layout(resolved.spec)
    cache = PrefixCache(pool, resolved.prefix_cache_ttl_s, layout)
    places = pool.num_blocks // layout.num_groups
    cache.pins = PrefixPins(int(resolved.prefix_pin_share * places))
    return cache
