"""Predicts latency and throughput at one operating point from the cost model alone.

The operating point is a closed loop: each of `batch` clients sends a prompt of `isl` tokens,
receives `osl` tokens, and sends the next prompt. The prediction contains:

    prompt_ms       a prompt that does not wait: its steps, including the decodes of the other
                    clients in them (batch 1: an idle engine)
    ttft_ms         prompt_ms and, on a device without a calibration, what its engine adds in a
                    closed loop: time outside the steps, and waiting for other clients' prompts
    decode_ms       one decode step of the batch in the middle of the answers
    tpot_ms         the mean step of a decoding client: decode_ms plus the other clients' prompts. A
                    request lasts K = osl - 1 + (steps of its prompt) steps, or as many as the token
                    budget needs for all clients' prompts; in that time every other client sends one
                    prompt. If a step holds at most one prompt, this is
                    decode + (batch - 1) / K · (time that a prompt adds to its steps)
    output_tok_s    batch · osl / (K steps, with all clients' prompts in them), by Little's law.
                    The time of K steps beyond ttft + (osl - 1) · tpot is the wait for other prompts
    kv_tokens_max   tokens of KV cache that the replica can hold
    kv_tokens_each  tokens of it that one sequence takes at its end; with windows or eviction fewer
                    than it has
    bound           the largest part of the decode step's time
    mbu, mfu        bytes and FLOPs of the decode step relative to the device's dense peaks
    interval        80 % intervals of TTFT, TPOT and throughput, from the errors in efficiency.toml

With pp > 1 the batch is divided into pp micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput, CannotRun, UserError
from ridgeline.hardware.catalogue import Accelerator, find_accelerator, load_catalogue
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.kv_eviction import check_model_evicts
from ridgeline.modelspec.cost.serving_formats import parse_kv_dtype, parse_weight_dtype
from ridgeline.modelspec.what_if import edited_spec
from ridgeline.plan.calibration.published_efficiency import interval
from ridgeline.plan.step_time.adapters import with_adapters
from ridgeline.plan.step_time.memory import (
    MemoryBudget,
    MemoryLimits,
    held_tokens,
    memory_budget,
    require_context,
    require_fit,
    with_drafter,
)
from ridgeline.plan.step_time.mixed_steps import MixedSteps, max_chunks, num_chunks
from ridgeline.plan.step_time.operating_point import (
    OperatingPoint,
    Pool,
    check_speculative,
    resolve_limits,
    validate_point,
)
from ridgeline.plan.step_time.packed_table import with_packed_table
from ridgeline.plan.step_time.parallel_layout import layout_from
from ridgeline.plan.step_time.quantization_cost import QuantizationCost, quantization_cost
from ridgeline.plan.step_time.replica import Replica, build_replica, with_measured_operators
from ridgeline.plan.step_time.speculation import SpeculationModel, kv_share, speculation_of
from ridgeline.plan.step_time.tier_loads import TierLoads, tier_loads
from ridgeline.records import KvEviction
from ridgeline.roofline import bound


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted latencies and throughput of an operating point.

    `decode_ms`: one decode step of the whole batch. `tpot_ms`: the mean step of a decoding client,
    including other clients' prompts. `mbu`, `mfu`: share of the device's dense peaks that the
    decode step uses. `interval`: 80 % intervals by field name. `tiers`: what is loaded from tiers
    of the KV cache, None where nothing was found there. `making`: what quantising the weights
    costs once, None where no method was named.
    """

    ttft_ms: float
    prompt_ms: float
    tpot_ms: float
    output_tok_s: float
    kv_tokens_max: int
    bound: str
    mbu: float
    mfu: float
    interval: dict[str, tuple[float, float]]
    decode_ms: float
    prefill_bound: str
    compute_dtype: str
    tiers: TierLoads | None = None
    kv_tokens_each: float | None = None
    making: QuantizationCost | None = None


class PointTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds at one operating point.

    `request_s`: from a prompt to the end of its answer, including waits for other prompts;
    `device_s`: each request's share of the replica's time.
    """

    ttft_s: float
    decode_s: float
    tpot_s: float
    request_s: float
    device_s: float
    output_tok_s: float


def predict(
    point: OperatingPoint,
    catalogue: Mapping[str, Accelerator] | None = None,
    *,
    measured: bool = False,
) -> Prediction:
    """Predict an operating point. `catalogue` replaces the built-in accelerators; `measured`:
    operators take the times that were measured under the point's engine.

    Raises BadInput, BadModel, CannotRun, or DoesNotFit if the point cannot be run.
    """
    validate_point(point)
    rows = _catalogue() if catalogue is None else dict(catalogue)
    if point.prefill is None or point.decode is None:
        machine = replica_of(point, rows, measured=measured)
        found = predict_on(machine, point)
        return msgspec.structs.replace(found, making=_making(machine, point, rows))
    prefill, decode = (
        replica_of(point, rows, pool, measured=measured) for pool in (point.prefill, point.decode)
    )
    return predict_pools(point, prefill, decode)


def _making(
    machine: Replica, point: OperatingPoint, rows: Mapping[str, Accelerator]
) -> QuantizationCost | None:
    """What the point's method costs once, and how much device time each request then saves."""
    if point.quantization_method is None:
        return None
    plain = msgspec.structs.replace(point, weight_dtype=None, quantization_method=None)
    before, after = (
        time_point(each, where, speculation_model(each, where)).device_s
        for each, where in ((replica_of(plain, rows), plain), (machine, point))
    )
    return quantization_cost(machine, point.quantization_method, before - after)


def replica_of(
    point: OperatingPoint,
    rows: Mapping[str, Accelerator],
    pool: Pool | None = None,
    *,
    measured: bool = False,
) -> Replica:
    """The replica of a point, or of one of its pools."""
    place = pool or Pool(
        tp=point.tp,
        pp=point.pp,
        attention_dp=point.attention_dp,
        moe_tp=point.moe_tp,
        moe_ep=point.ep,
    )
    spec = _planning_spec(point.model)
    if point.what_if is not None:
        spec = edited_spec(spec, point.what_if)
    layout = layout_from(
        spec,
        place.tp,
        place.pp,
        place.moe_ep,
        place.attention_dp,
        place.moe_tp,
        1 if pool else point.cp,
    )
    machine = build_replica(
        spec,
        find_accelerator(point.device, dict(rows)),
        msgspec.structs.replace(layout, sp=pool is None and point.sp),
        weight_dtype=None if point.weight_dtype is None else parse_weight_dtype(point.weight_dtype),
        kv_dtype=None if point.kv_dtype is None else parse_kv_dtype(point.kv_dtype),
        backend=point.backend,
    )
    if point.embedding_bits is not None:
        machine = with_packed_table(machine, point.embedding_bits)
    if measured and point.max_loras is not None:
        raise CannotRun(
            "--operators measured cannot be combined with adapters: their products are missing",
            value=point.max_loras,
            fix="leave one of them out",
        )
    if point.max_loras is not None:
        return with_adapters(machine, point.max_loras, point.max_lora_rank)
    return with_measured_operators(machine, point.backend) if measured else machine


def predict_pools(point: OperatingPoint, prefill: Replica, machine: Replica) -> Prediction:
    """`predict_on` where prompts are computed by replicas `prefill`, answers by replicas `machine`:
    decode steps hold no prompts.

    The transfer of the cache is part of `pool_first_s`, whatever its size.
    """
    assert point.prefill is not None and point.decode is not None
    first = predict_on(prefill, msgspec.structs.replace(point, batch=1, osl=1))
    batch = math.ceil(point.batch / point.decode.workers)
    alone = msgspec.structs.replace(point, batch=batch, cached=point.isl - 1, tiers=None)
    found = predict_on(machine, alone)
    tpot_ms = found.decode_ms * decode_pool_factor(machine, point)
    eff = machine.efficiency
    tpot_error = max(machine.tpot_error, eff.pool_tpot_error)
    clients = math.ceil(point.batch / point.prefill.workers)
    ttft_ms = 1000 * eff.pool_ttft_s(first.prompt_ms / 1000, clients)
    request_s = (ttft_ms + (point.osl - 1) * tpot_ms) / 1000
    output_tok_s = point.batch * point.osl / request_s
    return msgspec.structs.replace(
        found,
        ttft_ms=ttft_ms,
        prompt_ms=first.prompt_ms,
        tpot_ms=tpot_ms,
        decode_ms=tpot_ms,
        output_tok_s=output_tok_s,
        prefill_bound=first.prefill_bound,
        tiers=first.tiers,
        interval={
            "ttft_ms": interval(ttft_ms, eff.ttft_error),
            "tpot_ms": interval(tpot_ms, tpot_error),
            "output_tok_s": interval(output_tok_s, tpot_error),
        },
    )


def decode_pool_factor(machine: Replica, point: OperatingPoint) -> float:
    """The factor on a decode pool's steps that stands for what published points do not record.

    Most of it is speculation, so that a point which has its own does not take the factor, too.
    """
    return 1.0 if point.num_speculative_tokens else machine.efficiency.disaggregated


_catalogue = lru_cache(maxsize=1)(load_catalogue)
_planning_spec = lru_cache(maxsize=64)(load_planning_spec)


def predict_on(
    machine: Replica, point: OperatingPoint, limits: MemoryLimits | None = None
) -> Prediction:
    """Predict an operating point on an existing replica; the point's model, device and layout are
    ignored."""
    require_context(machine.spec, point.isl, point.osl)
    tokens = point.tokens_per_step(machine)
    limits, drafts = limits or _memory_limits(machine, point), speculation_model(machine, point)
    fits = memory_budget(machine, limits)
    if drafts is not None:
        taken, layout = (drafts.weight_bytes, drafts.kv_share), machine.cost.layout
        fits = with_drafter(fits, *taken, layout, limits.block_size)
    if point.kv_eviction is None:
        require_fit(machine, fits, point.isl + point.beam_width * point.osl, point.batch)
    else:
        _require_fit_evicting(machine, fits, point, point.kv_eviction)
    at = time_point(machine, point, drafts)
    batch = decoding_sequences(machine, point)
    if drafts is None:
        decode = machine.uniform(batch, 1, middle_of_answer(point), sampled=batch)
    else:
        decode = drafts.verify(machine, batch, middle_of_answer(point))
    loads = loads_of(machine, point)
    cached = point.cached + loads.tokens
    first = machine.uniform(1, min(point.isl - cached, tokens), cached, sampled=1)
    eff, least = machine.efficiency, bound(decode, machine.peaks)
    clients = max(1.0, point.batch / machine.layout.num_attention)
    ttft_s = eff.ttft_s(at.ttft_s, at.tpot_s, clients)
    return Prediction(
        ttft_ms=ttft_s * 1000,
        prompt_ms=at.ttft_s * 1000,
        tpot_ms=at.tpot_s * 1000,
        tiers=None if point.tiers is None else loads,
        output_tok_s=at.output_tok_s,
        kv_tokens_max=fits.kv_tokens,
        kv_tokens_each=_tokens_each(machine, point),
        bound=decode.bound,
        mbu=least.mbu(decode.seconds),
        mfu=least.mfu(decode.seconds),
        interval={
            "ttft_ms": interval(ttft_s * 1000, eff.ttft_error),
            "tpot_ms": interval(at.tpot_s * 1000, machine.tpot_error),
            "output_tok_s": interval(at.output_tok_s, machine.tpot_error),
        },
        decode_ms=at.decode_s * 1000,
        prefill_bound=first.bound,
        compute_dtype=machine.compute_dtype,
    )


def _require_fit_evicting(
    machine: Replica, fits: MemoryBudget, point: OperatingPoint, policy: KvEviction
) -> None:
    """Raise unless the model can evict and what the sequences keep fits the KV cache.

    A method that chooses by scores has one whole prompt in the cache until it is computed.
    """
    check_model_evicts(policy, machine.spec)
    kept = held_tokens(policy, point.isl, point.isl + point.osl)
    require_fit(machine, fits, kept, point.batch)
    if policy.needs_scores:
        require_fit(machine, fits, kept * (point.batch - 1) + point.isl)


def _memory_limits(machine: Replica, point: OperatingPoint) -> MemoryLimits:
    """Slots for the point's batch, but at least the server's default."""
    num_seqs, tokens = resolve_limits(machine, None, point.max_num_batched_tokens)
    return MemoryLimits(max_num_batched_tokens=tokens, max_num_seqs=max(num_seqs, point.batch))


def decoding_sequences(machine: Replica, point: OperatingPoint) -> int:
    """Sequences of one attention group in one micro-batch, beams counted one by one."""
    requests = math.ceil(point.batch / machine.layout.pp / machine.layout.num_attention)
    return requests * point.beam_width


def middle_of_answer(point: OperatingPoint) -> int:
    """Tokens in the cache before a decode step in the middle of the answer."""
    return held_tokens(point.kv_eviction, point.isl, point.isl + point.osl // 2)


def _tokens_each(machine: Replica, point: OperatingPoint) -> float:
    """Tokens in the cache of one sequence at its end."""
    context = point.isl + point.osl
    if point.kv_eviction is None:
        whole = machine.cost.kv_tokens(context)
        return whole + (point.beam_width - 1) * (whole - machine.cost.kv_tokens(point.isl))
    return held_tokens(point.kv_eviction, point.isl, context)


def speculation_model(machine: Replica, point: OperatingPoint) -> SpeculationModel | None:
    """The speculation of a point, or None. Raises BadInput if its options are incomplete."""
    if point.speculative is not None:
        check_speculative(point)
        drafts = speculation_of(
            point.speculative, point.acceptance, point.draft_share, machine, _planning_spec
        )
        return drafts.at(machine, decoding_sequences(machine, point), middle_of_answer(point))
    if not point.num_speculative_tokens:
        if point.acceptance is not None or point.draft_model is not None:
            raise BadInput(
                "acceptance and draft_model have no effect without drafts",
                value=point.acceptance if point.draft_model is None else point.draft_model,
                fix="give num_speculative_tokens",
            )
        return None
    if point.acceptance is None:
        raise BadInput(
            "speculation needs the acceptance of drafts",
            value=point.num_speculative_tokens,
            fix="measure it: ridgeline bench prints drafted and accepted tokens",
        )
    draft = None
    if point.draft_model is not None:
        draft_spec = _planning_spec(point.draft_model)
        draft = build_replica(draft_spec, machine.device, machine.layout, kv_dtype=machine.kv_dtype)
    return SpeculationModel(
        num_tokens=point.num_speculative_tokens,
        acceptance=point.acceptance,
        draft=draft,
        share=point.draft_share,
        computed=point.draft_share,
        weight_bytes=0.0 if draft is None else draft.resident_bytes,
        kv_share=kv_share(machine, draft),
    )


def time_point(
    machine: Replica, point: OperatingPoint, drafts: SpeculationModel | None = None
) -> PointTiming:
    """The times of a point, whether or not it fits the memory."""
    decode_s = decode_step_s(machine, point, drafts)
    mixed = mixed_steps(machine, point, drafts)
    clients = point.batch / machine.layout.num_attention / mixed.num_rounds
    steps = steps_of_request(point, clients, mixed.num_chunks, mixed.max_chunks)
    chunks = clients * mixed.num_chunks / steps
    request_s = steps * mixed.seconds(chunks)
    first_s = request_overhead_s(machine) + loads_of(machine, point).wait_s
    return PointTiming(
        ttft_s=mixed.prompt_s + first_s,
        decode_s=decode_s,
        tpot_s=mixed.seconds(chunks * (point.batch - 1) / point.batch),
        request_s=request_s + first_s,
        device_s=request_s / point.batch,
        output_tok_s=point.batch * point.osl / (request_s + first_s),
    )


def steps_of_request(
    point: OperatingPoint, clients: float, num_chunks: int, chunks_per_step: float
) -> float:
    """Steps that a request lasts: those of its prompt and answer, or as many as the prompts of all
    `clients` of its micro-batch need at `chunks_per_step`."""
    return max(point.osl - 1 + num_chunks, clients * num_chunks / chunks_per_step)


def loads_of(machine: Replica, point: OperatingPoint) -> TierLoads:
    """What is loaded from tiers of the KV cache for a prompt of this point."""
    return tier_loads(machine, point.tiers, point.cached, point.tokens_per_step(machine))


def mixed_steps(
    machine: Replica, point: OperatingPoint, drafts: SpeculationModel | None = None
) -> MixedSteps:
    """The steps of one micro-batch of one attention group at this point."""
    loads = loads_of(machine, point)
    cached = point.cached + loads.tokens
    width = point.beam_width
    active, new = decoding_sequences(machine, point) // width, point.isl - cached
    groups = machine.layout.num_attention
    num_rounds = min(machine.layout.pp, math.ceil(point.batch / groups))
    room = max(1, point.tokens_per_step(machine) - (active - 1) * width)
    clients = point.batch / groups / num_rounds
    steps = steps_of_request(point, clients, num_chunks(new, room), max_chunks(new, room))
    # All other sequences decode during a prompt, unless the workload consists mostly of prompts.
    others = min(active - 1, math.ceil(clients * (point.osl - 1) / steps))
    return MixedSteps(
        machine,
        prompt=(cached, point.isl),
        decoding=(others * width, middle_of_answer(point)),
        room=room,
        decode_s=_decode_s(
            machine, point, drafts, (active if others == active - 1 else others) * width
        ),
        num_rounds=num_rounds,
        copy_s=loads.copy_s,
    )


def request_overhead_s(machine: Replica) -> float:
    """Seconds of a request outside its steps, on a calibrated machine; else 0."""
    return 0.0 if machine.calibration is None else machine.calibration.overheads.first_s


def decode_step_s(
    machine: Replica, point: OperatingPoint, drafts: SpeculationModel | None = None
) -> float:
    """Seconds of a decode step of the whole batch, in the middle of the answers."""
    return _decode_s(machine, point, drafts, decoding_sequences(machine, point))


def _decode_s(
    machine: Replica, point: OperatingPoint, drafts: SpeculationModel | None, batch: int
) -> float:
    """Seconds of a decode step; with drafts, seconds per token of each sequence."""
    batch = max(1, batch)
    if drafts is None:
        return machine.uniform(batch, 1, middle_of_answer(point), sampled=batch).seconds
    return drafts.decode_s(machine, batch, middle_of_answer(point))


def predict_lines(
    lines: Iterable[str | bytes], answer: Callable[[OperatingPoint], object] = predict
) -> Iterator[dict[str, Any]]:
    """Predict the operating points of JSON lines.

    Yields one object per line: the prediction, or `error`. An `id` is copied to the output. Empty
    lines are skipped.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        result: dict[str, Any] = {}
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            if "id" in fields:
                result["id"] = fields.pop("id")
            result |= msgspec.to_builtins(answer(msgspec.convert(fields, OperatingPoint)))
        except (UserError, *DECODE_ERRORS) as error:
            result["error"] = f"line {number}: {error}"
        yield result
