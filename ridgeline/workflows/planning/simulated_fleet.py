"""The fleet of a simulation: its kinds of replicas, their schedulers and step times."""

from __future__ import annotations

import math
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
from ridgeline.engine.scheduler.kv.prefix_pins import PrefixPins
from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import Accelerator, find_accelerator
from ridgeline.hardware.links import with_links
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.kv_cache import has_states
from ridgeline.modelspec.cost.kv_eviction import check_model_evicts
from ridgeline.modelspec.cost.serving_formats import parse_kv_dtype, parse_weight_dtype
from ridgeline.modelspec.what_if import edited_spec
from ridgeline.plan.calibration.interference import MEDIAN_LEVEL, InterferenceSampler
from ridgeline.plan.fleet.cache_needs import check_pins
from ridgeline.plan.simulate.answer_cache import AnswerCache
from ridgeline.plan.simulate.block_counter import CountingBlockPool
from ridgeline.plan.simulate.further_models import FurtherModel, divide_memory
from ridgeline.plan.simulate.kv_tiers import TierSizes, add_tiers, tier_sizes
from ridgeline.plan.simulate.off_peak import OffPeak
from ridgeline.plan.simulate.records import (
    Autoscaling,
    FaultModel,
    FleetConfig,
    LaneConfig,
    ReplicaConfig,
)
from ridgeline.plan.step_time.adapters import with_adapters
from ridgeline.plan.step_time.memory import (
    MemoryLimits,
    memory_budget,
    require_context,
    require_fit,
    with_drafter,
)
from ridgeline.plan.step_time.operating_point import resolve_limits
from ridgeline.plan.step_time.parallel_layout import layout_from
from ridgeline.plan.step_time.replica import Replica, build_replica
from ridgeline.plan.step_time.simulated import (
    LAUNCH_LAYER_S,
    SCHEDULE_SEQUENCE_S,
    SCHEDULE_STEP_S,
    HostedStepTimes,
    HostTime,
    masks_s,
)
from ridgeline.plan.step_time.speculation import SpeculationModel, speculation_of
from ridgeline.plan.step_time.tier_loads import require_no_rates
from ridgeline.records import Slo
from ridgeline.workflows.planning.device_catalogue import (
    default_device,
    parse_stock,
    read_catalogue,
)
from ridgeline.workflows.planning.simulated_load import read_further_models

ANSWER_TTL_S, PIN_SHARE = 3600.0, 0.5  # as of the server

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
    if options.decode_replicas and options.completion_window is not None:
        raise BadInput(
            "--completion-window cannot be combined with --decode-replicas: batch requests are "
            "computed where they are taken",
            fix="leave one of them out",
        )
    check_pins(kinds[0][0].spec, options.pinned_len)
    if sum(count for _, count in kinds) > MAX_REPLICAS:
        raise BadInput("--accelerator names too many replicas", limit=f"{MAX_REPLICAS:,}")
    replicas = _builds(options, kinds, longest_request)
    faults = None
    if options.mtbf_s is not None:
        faults = FaultModel(mtbf_s=options.mtbf_s, repair_s=options.repair_s)
    return FleetConfig(
        replicas=tuple(replicas[: len(replicas) - options.decode_replicas]),
        decode=tuple(replicas[len(replicas) - options.decode_replicas :]),
        transfer_s=_kv_transfer_s(kinds[0][0]) if options.decode_replicas else None,
        router=options.router,
        scaling=_scaling(options),
        faults=faults,
        seed=options.seed,
        # The throttle and the wait read times of tokens, which skipped steps do not report.
        fast_forward=not (options.step_by_step or options.slo_throttle or _derives_wait(options)),
        throttle=_throttle(options),
        slo=options.parsed_slo if _derives_wait(options) or options.batch_share else None,
        resume=options.resume_requests,
        off_peak=None if options.off_peak is None else OffPeak.parse(options.off_peak),
        answers=_answers(options),
    )


def _answers(options: SimulateOptions) -> Callable[[], AnswerCache] | None:
    """Makes the response cache of a replica, where a recording says what repeats."""
    if options.response_cache_size is None:
        return None
    ttl_s = options.response_cache_ttl
    return partial(
        AnswerCache, options.response_cache_size, ANSWER_TTL_S if ttl_s is None else ttl_s
    )


def _builds(
    options: SimulateOptions, kinds: Sequence[Kind], longest_request: int
) -> list[ReplicaConfig]:
    """The replicas of a fleet in their order; the first ones have the most models."""
    models, known, found = read_further_models(options), {}, []
    wanted = [model.replicas for model in models if model.replicas is not None]
    size = sum(count for _, count in kinds)
    if any(count > size for count in wanted):
        raise BadInput(
            "a model is to be on more replicas than there are", value=max(wanted), limit=size
        )
    if wanted and (options.decode_replicas or options.autoscale is not None):
        raise BadInput(
            "replicas of a further model need a fleet of one size, whose replicas are alike",
            value=str(options.further_models),
            fix="remove --decode-replicas and --autoscale, or the rows' replicas",
        )
    for number, kind in enumerate(i for i, (_, count) in enumerate(kinds) for _ in range(count)):
        present = tuple(m for m in models if m.replicas is None or number < m.replicas)
        if (kind, present) not in known:
            known[kind, present] = _build(options, kinds[kind][0], longest_request, present)
        found.append(known[kind, present])
    return found


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
    return _with_options(
        options, options.model, device, options.quantization, options.kv_cache_dtype
    )


def _with_options(
    options: SimulateOptions,
    model: str,
    device: Accelerator,
    quantization: str | None,
    kv_cache_dtype: str | None,
) -> Replica:
    """A model on the devices of the options' layout."""
    spec = load_planning_spec(model)
    if options.what_if is not None and model == options.model:
        spec = edited_spec(spec, options.what_if)
    layout = layout_from(
        spec,
        options.tensor_parallel_size,
        options.pipeline_parallel_size,
        options.expert_parallel_size,
        options.attention_dp_size,
        None,
        options.context_parallel_size,
    )
    machine = build_replica(
        spec,
        device,
        msgspec.structs.replace(layout, sp=options.sequence_parallel),
        weight_dtype=None if quantization is None else parse_weight_dtype(quantization),
        kv_dtype=None if kv_cache_dtype is None else parse_kv_dtype(kv_cache_dtype),
    )
    if options.max_loras is None:
        return machine
    return with_adapters(machine, options.max_loras, options.max_lora_rank)


def _build(
    options: SimulateOptions,
    model: Replica,
    longest_request: int,
    further: Sequence[FurtherModel] = (),
) -> ReplicaConfig:
    """One kind of replica: `model`, and further models on the same devices."""
    layout = model.layout
    if layout.pp > 1 and layout.num_attention > 1:
        raise BadInput(
            "replicas with pipeline stages and several attention groups cannot be simulated",
            value=str(layout),
            fix="leave one of them out",
        )
    _check_context(options)
    _check_further(options, model, further)
    machines = [model]
    for row in further:
        machines.append(
            _with_options(options, row.model, model.device, row.weight_dtype, row.kv_dtype)
        )
    limits = _memory_limits(options, model)
    shares = [limits.utilization]
    if further:
        wanted = [None, *(row.gpu_memory_utilization for row in further)]
        shares = divide_memory(machines, limits, wanted)
    longest = [longest_request, *(row.isl + row.osl for row in further)]
    lanes = [
        LaneConfig(
            model=name,
            scheduler=_scheduler_factory(
                options, machine, msgspec.structs.replace(limits, utilization=share), tokens
            ),
            step_times=step_times_of(options, machine),
        )
        for name, machine, share, tokens in zip(
            (options.model if options.further_models else "", *(row.model for row in further)),
            machines,
            shares,
            longest,
            strict=True,
        )
    ]
    calibration = model.calibration
    interference = None if calibration is None else calibration.interference
    reader_s = 0.0 if calibration is None else calibration.overheads.reader_first_s
    level = MEDIAN_LEVEL if options.num_seeds == 1 else None
    return ReplicaConfig(
        name=model.device.name,
        model=lanes[0].model,
        scheduler=lanes[0].scheduler,
        step_times=lanes[0].step_times,
        further=tuple(lanes[1:]),
        num_stages=layout.pp,
        num_groups=layout.num_attention,
        num_devices=layout.num_devices,
        overhead_s=model.efficiency.first_s + reader_s,
        interference=None
        if interference is None
        else partial(InterferenceSampler, interference, options.seed, level=level),
    )


def _memory_limits(options: SimulateOptions, model: Replica) -> MemoryLimits:
    slots, tokens = resolve_limits(model, options.max_num_seqs, options.max_num_batched_tokens)
    return MemoryLimits(
        max_num_batched_tokens=tokens, max_num_seqs=slots, block_size=options.block_size
    )


def _scheduler_factory(
    options: SimulateOptions, model: Replica, memory: MemoryLimits, longest_request: int
) -> Callable[[], Scheduler]:
    """Makes the schedulers of a model: of a pipeline's stage or an attention group, with their part
    of slots and blocks."""
    fits, drafts = memory_budget(model, memory), _speculation(options, model)
    if drafts is not None:
        taken, layout = (drafts.weight_bytes, drafts.kv_share), model.cost.layout
        fits = with_drafter(fits, *taken, layout, memory.block_size)
    num_parts = model.layout.pp * model.layout.num_attention
    require_context(model.spec, longest_request)
    policy = options.kv_eviction_config
    check_model_evicts(policy, model.spec)
    if policy is None or policy.needs_scores:  # these have the whole prompt in the cache
        require_fit(model, fits, longest_request, num_parts)
    limits = SchedulerLimits(
        max_num_seqs=math.ceil(memory.max_num_seqs / model.layout.pp),
        max_num_batched_tokens=memory.max_num_batched_tokens,
        max_model_len=longest_request,
        chunked_prefill=options.enable_chunked_prefill,
        kv_layout=model.cost.layout,
        kv_eviction=policy,
        background_tokens=options.background_tokens,
    )
    share = PIN_SHARE if options.prefix_pin_share is None else options.prefix_pin_share

    tiers = _tiers(options, model.layout.num_devices)
    block_bytes = int(limits.kv_layout.block_bytes(memory.block_size) * model.kv_copies)

    def make_scheduler() -> Scheduler:
        num_blocks = fits.kv_blocks // num_parts
        # Counting free blocks is faster, but only named blocks can be cached or preempted.
        named = options.enable_prefix_caching or options.batch_share
        pool = (BlockPool if named else CountingBlockPool)(num_blocks, memory.block_size)
        caching = options.enable_prefix_caching and not has_states(model.spec)
        cache = PrefixCache(pool, layout=limits.kv_layout) if caching else NoPrefixCache()
        if isinstance(cache, PrefixCache):
            cache.pins = PrefixPins(int(share * (num_blocks // limits.kv_layout.num_groups)))
        policy = make_policy(options.batching, wait_s=seconds_of(options.batch_wait_ms))
        scheduler = Scheduler(limits, policy, pool, cache)
        add_tiers(scheduler, tiers, block_bytes)
        return scheduler

    return make_scheduler


def _check_further(
    options: SimulateOptions, model: Replica, further: Sequence[FurtherModel]
) -> None:
    """Raise BadInput for what several models on the same devices are not combined with."""
    names = [options.model, *(row.model for row in further)]
    if len(set(names)) < len(names):
        raise BadInput("--further-models names a model twice", value=", ".join(names))
    parts = model.layout.pp * model.layout.num_attention
    if model.calibration is not None and (further or parts > 1):
        raise BadInput(
            "a calibration is of one model that has its device for itself",
            value=str(options.further_models or model.layout),
            fix="simulate a device of the catalogue",
        )
    if further and parts > 1:
        raise BadInput(
            "several models of one device cannot be simulated with stages or attention groups",
            value=str(model.layout),
            fix="leave --further-models or the layout out",
        )
    if (further or parts > 1) and (options.kv_tier_memory or options.kv_tier_size):
        raise BadInput(
            "tiers of the KV cache belong to one scheduler",
            value=f"{len(names) * parts} on a device",
            fix="leave out --kv-tier-memory and --kv-tier-size",
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


def step_times_of(options: SimulateOptions, machine: Replica) -> HostedStepTimes:
    """How long the steps of a model take, with its drafts and the host."""
    overlapped = options.async_scheduling
    if machine.calibration is not None and (options.enforce_eager or not overlapped):
        raise CannotRun(
            "a calibration times steps as the engine runs them, launches and scheduling included",
            value="--enforce-eager" if options.enforce_eager else "--no-async-scheduling",
            fix="leave it out, or simulate a device of the catalogue",
        )
    host = HostTime(
        layer_s=LAUNCH_LAYER_S if options.enforce_eager else 0.0,
        step_s=0.0 if overlapped else SCHEDULE_STEP_S,
        sequence_s=0.0 if overlapped else SCHEDULE_SEQUENCE_S,
        token_s=masks_s(
            machine.spec.vocab_size, options.structured_share, options.token_rules_share
        ),
    )
    return HostedStepTimes(machine, _speculation(options, machine), host)


def _speculation(options: SimulateOptions, machine: Replica) -> SpeculationModel | None:
    if options.speculative_config is not None:
        return speculation_of(
            options.speculative_config, options.acceptance, options.draft_share, machine
        )
    if not options.num_speculative_tokens:
        return None
    if options.acceptance is None:
        raise BadInput(
            "--num-speculative-tokens needs the acceptance rate of draft tokens",
            value=options.num_speculative_tokens,
            fix="add --acceptance",
        )
    return SpeculationModel(
        num_tokens=options.num_speculative_tokens,
        acceptance=options.acceptance,
        share=options.draft_share,
    )


def _kv_transfer_s(model: Replica) -> Callable[[int], float]:
    """Seconds to send the KV cache of a number of prompt tokens, all devices in parallel."""
    rate = model.device.network_bytes_s * model.layout.num_devices
    return lambda tokens: model.cost.kv_bytes(tokens) * model.kv_copies / rate


def _scaling(options: SimulateOptions) -> Autoscaling | None:
    if options.autoscale is None:
        return None
    slo = options.parsed_slo
    return Autoscaling(
        target=options.target_in_flight,
        allowed_wait_s=None if slo is None else slo.ttft_s,
        max_replicas=options.autoscale,
        min_replicas=options.replicas,
        startup_s=options.startup_s,
        stable_s=options.startup_s,
    )
