"""The fleet of a simulation: its kinds of replicas, their schedulers and step times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ridgeline.config.planning import SimulateOptions
from ridgeline.config.units import MAX_REPLICAS
from ridgeline.engine.scheduler import (
    BlockPool,
    NoPrefixCache,
    PrefixCache,
    Scheduler,
    SchedulerLimits,
    make_policy,
    seconds_of,
)
from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import Accelerator, find_accelerator
from ridgeline.hardware.links import with_links
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.kv_eviction import check_model_evicts
from ridgeline.modelspec.cost.serving_formats import parse_kv_dtype, parse_weight_dtype
from ridgeline.plan.calibration.interference import MEDIAN_LEVEL, InterferenceSampler
from ridgeline.plan.simulate.block_counter import CountingBlockPool
from ridgeline.plan.simulate.kv_tiers import TierSizes, add_tiers, tier_sizes
from ridgeline.plan.simulate.records import Autoscaling, FaultModel, FleetConfig, ReplicaConfig
from ridgeline.plan.step_time.adapters import with_adapters
from ridgeline.plan.step_time.memory import BLOCK_SIZE, MemoryLimits, memory_budget, require_fit
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.predict import resolve_limits
from ridgeline.plan.step_time.replica import Replica, build_replica
from ridgeline.plan.step_time.simulated import ModelledStepTimes, StepTimes
from ridgeline.plan.step_time.speculation import SpeculationModel
from ridgeline.plan.step_time.tier_loads import require_no_rates
from ridgeline.records import Slo
from ridgeline.workflows.planning.device_catalogue import (
    default_device,
    parse_stock,
    read_catalogue,
)

Kind = tuple[Replica, int]
"""A kind of replica, and how many of it the fleet has."""


def kinds_of(options: SimulateOptions) -> list[Kind]:
    """One kind of replica, or several: `--accelerator h100-sxm=2,l40s=4` names two."""
    rows = read_catalogue(options.catalogue, options.calibration)
    catalogue = with_links(rows, options.interconnect, options.network)
    device = default_device(options.accelerator, catalogue)
    if device is None:
        raise BadInput("simulate needs --accelerator or --calibration", value=device)
    if "=" not in device:
        return [(_model_replica(options, find_accelerator(device, catalogue)), options.replicas)]
    if options.replicas != 1 or options.decode_replicas or options.autoscale is not None:
        raise BadInput(
            "--accelerator with counts fixes the size of the fleet",
            value=device,
            fix="remove --replicas, --decode-replicas and --autoscale",
        )
    stock = parse_stock(device, catalogue)
    return [(_model_replica(options, catalogue[name]), count) for name, count in stock.items()]


def fleet_plan(
    options: SimulateOptions, kinds: Sequence[Kind], longest_request: int
) -> FleetConfig:
    """The fleet to simulate. `longest_request`: prompt and output tokens that must fit.

    Raises BadInput for too many replicas, or if none is left for prompts.
    """
    if options.decode_replicas and options.decode_replicas >= options.replicas:
        raise BadInput(
            "no replica is left to compute prompts",
            value=f"--decode-replicas {options.decode_replicas}",
            limit=f"below --replicas {options.replicas}",
            fix=f"--replicas {options.decode_replicas + 1}",
        )
    replicas = [(_build(options, model, longest_request), count) for model, count in kinds]
    if sum(count for _, count in kinds) > MAX_REPLICAS:
        raise BadInput("--accelerator names too many replicas", limit=f"{MAX_REPLICAS:,}")
    faults = None
    if options.mtbf_s is not None:
        faults = FaultModel(mtbf_s=options.mtbf_s, repair_s=options.repair_s)
    return FleetConfig(
        replicas=tuple(build for build, count in replicas for _ in range(count))[
            options.decode_replicas :
        ],
        decode=(replicas[0][0],) * options.decode_replicas,
        transfer_s=_kv_transfer_s(kinds[0][0]) if options.decode_replicas else None,
        router=options.router,
        scaling=_scaling(options),
        faults=faults,
        seed=options.seed,
        # The throttle and the wait read times of tokens, which skipped steps do not report.
        fast_forward=not (options.step_by_step or options.slo_throttle or _derives_wait(options)),
        throttle=_throttle(options),
        slo=options.parsed_slo if _derives_wait(options) else None,
    )


def _derives_wait(options: SimulateOptions) -> bool:
    """Whether batches wait as long as the SLO allows."""
    is_dynamic, slo = options.batching == "dynamic", options.parsed_slo
    return is_dynamic and options.batch_wait_ms is None and slo is not None


def _throttle(options: SimulateOptions) -> Slo | None:
    """The SLO that the throttle keeps; None without it. Raises BadInput."""
    slo = options.parsed_slo
    if not options.slo_throttle:
        return None
    if slo is None or (slo.ttft_s is None and slo.tpot_s is None):
        raise BadInput(
            "--slo-throttle needs a TTFT or TPOT to keep", fix='add --slo "ttft:500 tpot:50"'
        )
    if options.decode_replicas:
        raise BadInput(
            "--slo-throttle cannot be combined with --decode-replicas: no replica sees a request's"
            " first and last token",
            fix="leave one of them out",
        )
    return slo


def _model_replica(options: SimulateOptions, device: Accelerator) -> Replica:
    machine = build_replica(
        load_planning_spec(options.model),
        device,
        Layout(
            tp=options.tensor_parallel_size,
            ep=options.expert_parallel_size,
            cp=options.context_parallel_size,
            sp=options.sequence_parallel,
        ),
        weight_dtype=None
        if options.quantization is None
        else parse_weight_dtype(options.quantization),
        kv_dtype=None if options.kv_cache_dtype is None else parse_kv_dtype(options.kv_cache_dtype),
    )
    if options.max_loras is None:
        return machine
    return with_adapters(machine, options.max_loras, options.max_lora_rank)


def _build(options: SimulateOptions, model: Replica, longest_request: int) -> ReplicaConfig:
    if model.layout.pp > 1 or model.layout.num_attention > 1:
        raise BadInput(
            "replicas with pipeline stages or several attention groups cannot be simulated",
            value=str(model.layout),
            fix="use tp, and ep up to tp",
        )
    _check_context(options)
    slots, tokens = resolve_limits(model, options.max_num_seqs, options.max_num_batched_tokens)
    fits = memory_budget(model, MemoryLimits(max_num_batched_tokens=tokens, max_num_seqs=slots))
    policy = options.kv_eviction_config
    check_model_evicts(policy, model.spec)
    if policy is None or policy.needs_scores:  # these have the whole prompt in the cache
        require_fit(model, fits, longest_request)
    limits = SchedulerLimits(
        max_num_seqs=slots,
        max_num_batched_tokens=tokens,
        max_model_len=min(model.spec.max_positions, max(longest_request, 1)),
        kv_layout=model.cost.layout,
        kv_eviction=policy,
    )

    tiers = _tiers(options, model.layout.num_devices)
    block_bytes = int(limits.kv_layout.block_bytes(BLOCK_SIZE) * model.kv_copies)

    def make_scheduler() -> Scheduler:
        num_blocks = fits.kv_blocks
        # Counting free blocks is faster, but only named blocks can be cached or preempted.
        named = options.enable_prefix_caching or options.batch_share
        pool = (BlockPool if named else CountingBlockPool)(num_blocks, BLOCK_SIZE)
        caching = options.enable_prefix_caching
        cache = PrefixCache(pool, layout=limits.kv_layout) if caching else NoPrefixCache()
        policy = make_policy(options.batching, wait_s=seconds_of(options.batch_wait_ms))
        scheduler = Scheduler(limits, policy, pool, cache)
        add_tiers(scheduler, tiers, block_bytes)
        return scheduler

    step_times: StepTimes = ModelledStepTimes(model, _speculation(options))
    calibration = model.calibration
    interference = None if calibration is None else calibration.interference
    level = MEDIAN_LEVEL if options.num_seeds == 1 else None
    return ReplicaConfig(
        name=model.device.name,
        scheduler=make_scheduler,
        step_times=step_times,
        num_devices=model.layout.num_devices,
        overhead_s=0.0 if calibration is None else calibration.overheads.reader_first_s,
        interference=None
        if interference is None
        else partial(InterferenceSampler, interference, options.seed, level=level),
    )


def _check_context(options: SimulateOptions) -> None:
    """Raise BadInput for what the engine does not combine with a divided KV cache."""
    policy = options.kv_eviction_config
    whole = {
        "--kv-tier-memory": options.kv_tier_memory is not None,
        "--kv-tier-size": options.kv_tier_size is not None,
        "--kv-eviction-config": policy is not None and policy.evicts,
        "--decode-replicas": bool(options.decode_replicas),
    }
    wanted = [name for name, is_set in whole.items() if is_set]
    if options.context_parallel_size > 1 and wanted:
        raise BadInput(
            f"{', '.join(wanted)} needs a KV cache that one device holds as a whole",
            value=f"--context-parallel-size {options.context_parallel_size}",
            fix="leave one of them out",
        )


def _tiers(options: SimulateOptions, num_devices: int) -> TierSizes:
    """The tiers below each replica's prefix cache. Raises BadInput where they have no effect."""
    rates = (options.kv_tier_memory_bandwidth, options.kv_tier_file_bandwidth)
    if options.kv_tier_memory is None and options.kv_tier_size is None:
        require_no_rates(rates, "--kv-tier-memory or --kv-tier-size")
        return TierSizes()
    if not options.enable_prefix_caching:
        raise BadInput(
            "tiers of the KV cache have no effect without --enable-prefix-caching",
            value=options.kv_tier_memory or options.kv_tier_size,
            fix="add it: tiers extend the prefix cache",
        )
    sizes = tier_sizes(
        options.kv_tier_memory, options.kv_tier_size, options.kv_tier_size is not None, rates
    )
    # All devices of a replica copy their parts at the same time.
    return msgspec.structs.replace(sizes, memory_bytes_s=sizes.memory_bytes_s * num_devices)


def _speculation(options: SimulateOptions) -> SpeculationModel | None:
    if not options.num_speculative_tokens:
        return None
    if options.acceptance is None:
        raise BadInput(
            "--num-speculative-tokens needs the acceptance rate of draft tokens",
            value=options.num_speculative_tokens,
            fix="add --acceptance",
        )
    return SpeculationModel(
        num_tokens=options.num_speculative_tokens, acceptance=options.acceptance
    )


def _kv_transfer_s(model: Replica) -> Callable[[int], float]:
    """Seconds to send the KV cache of a number of prompt tokens, all devices in parallel."""
    rate = model.device.network_bytes_s * model.layout.num_devices
    return lambda tokens: model.cost.kv_bytes(tokens) * model.kv_copies / rate


def _scaling(options: SimulateOptions) -> Autoscaling | None:
    if options.autoscale is None:
        return None
    return Autoscaling(
        target=options.target_in_flight,
        max_replicas=options.autoscale,
        min_replicas=options.replicas,
        startup_s=options.startup_s,
        stable_s=options.startup_s,
    )
