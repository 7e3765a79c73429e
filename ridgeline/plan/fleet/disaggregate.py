"""Decides whether prefill and decode should run on separate devices.

On shared replicas every prompt delays the decodes in the same steps. With disaggregation that
interference disappears, but every prompt's KV cache is sent over the network, which adds bytes /
rate to the TTFT. According to vLLM's documentation, disaggregation does not improve throughput; it
allows TTFT and ITL to be controlled separately. The verdict is therefore yes only if the pools need
fewer devices for the same SLO, or if no shared fleet can meet it.

Both pools use one kind of device and the same formats; their layouts may differ. A prefill
replica is an M/G/1 queue of prompts; a decode replica runs as many sequences as TPOT and memory
allow, with a margin of one standard deviation of the Poisson number in flight, as in
`ridgeline.plan.fleet.search`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from ridgeline.plan.fleet.cache_needs import cache_needs
from ridgeline.plan.fleet.demand import Demand, wait_quantile
from ridgeline.plan.fleet.search import Candidate, batch_sizes
from ridgeline.plan.step_time.memory import MemoryLimits, memory_budget
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.predict import decode_step_s
from ridgeline.plan.step_time.replica import Replica
from ridgeline.records import Slo
from ridgeline.report.numbers import rounded

_BISECTIONS = 40


class DisaggregatedPools(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of the two pools, and the latencies that they achieve, in seconds."""

    num_prefill: int
    num_decode: int
    num_devices: int
    prefill_s: float
    transfer_s: float
    ttft_s: float
    tpot_s: float
    decode_batch: int
    prefill_layout: Layout
    decode_layout: Layout

    @property
    def ratio(self) -> str:
        """prefill : decode, reduced to lowest terms."""
        common = math.gcd(self.num_prefill, self.num_decode)
        return f"{self.num_prefill // common}:{self.num_decode // common}"


class DisaggregationVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether to disaggregate, the reason, and the figures of both alternatives.

    `pools` is None if no split meets the SLO.
    """

    yes: bool
    why: str
    pools: DisaggregatedPools | None
    shared_devices: int | None
    transfer_s: float
    interference_s: float | None


def transfer_seconds(machine: Replica, demand: Demand) -> float:
    """Seconds to send a mean prompt's KV cache, each device of the replica sending its share."""
    nbytes = machine.cost.kv_bytes(demand.isl) * machine.kv_copies
    return nbytes / (machine.device.network_bytes_s * machine.layout.num_devices)


class _DecodePool(NamedTuple):
    """A decode replica's layout and mean batch, and the pool of them that the demand needs."""

    machine: Replica
    batch: int
    tpot_s: float
    num_replicas: int

    @property
    def num_devices(self) -> int:
        return self.num_replicas * self.machine.layout.num_devices


def smallest_pools(
    machines: Sequence[Replica], demand: Demand, slo: Slo
) -> DisaggregatedPools | None:
    """The smallest split that meets the SLO, each pool with any of these layouts; None if there is
    none.

    An e2e limit is shared by the pools: the prompt may use the time that decoding leaves.
    """
    fitting = [split for split in _splits(machines, demand, slo) if split is not None]
    return min(fitting, key=lambda split: (split.num_devices, split.tpot_s), default=None)


def _splits(
    machines: Sequence[Replica], demand: Demand, slo: Slo
) -> Iterator[DisaggregatedPools | None]:
    decoding = [
        (
            machine,
            batch,
            decode_step_s(machine, _point(demand, math.ceil(batch + math.sqrt(batch)))),
        )
        for machine in machines
        for batch in _decode_batches(machine, demand)
    ]
    limit_s = math.inf if slo.tpot_s is None or demand.osl == 1 else slo.tpot_s
    within = [choice for choice in decoding if choice[2] <= limit_s]
    for prefill in machines:
        transfer_s = transfer_seconds(prefill, demand)
        pools = [
            _DecodePool(
                machine,
                batch,
                tpot_s,
                math.ceil(demand.computed_rate * (demand.osl * tpot_s + transfer_s) / batch),
            )
            for machine, batch, tpot_s in within
        ]
        for pool in _front(pools):
            yield _split(prefill, pool, demand, slo)


def _front(pools: Sequence[_DecodePool]) -> Iterator[_DecodePool]:
    """Those that no other beats in both devices and TPOT: only these can be part of the best."""
    least_s = math.inf
    for pool in sorted(pools, key=lambda pool: (pool.num_devices, pool.tpot_s)):
        if pool.tpot_s < least_s:
            least_s = pool.tpot_s
            yield pool


def _split(
    prefill: Replica, pool: _DecodePool, demand: Demand, slo: Slo
) -> DisaggregatedPools | None:
    """A prefill pool for a decode pool; None if they miss the SLO.

    TPOT is that of a decode replica with one standard deviation more in flight.
    """
    transfer_s = transfer_seconds(prefill, demand)
    prompt_s = prefill.uniform(
        1, demand.computed_isl - demand.found, demand.found, sampled=1
    ).seconds
    # osl, not osl - 1: the step in progress on arrival
    held_s = demand.osl * pool.tpot_s + transfer_s
    left_s = min(
        math.inf if slo.ttft_s is None else slo.ttft_s - transfer_s,
        math.inf if slo.e2e_s is None else slo.e2e_s - held_s,
    )
    rate = _prefill_rate(prefill, prompt_s, demand, slo, left_s)
    if rate <= 0:
        return None
    num_prefill = math.ceil(demand.computed_rate / rate)
    wait_s = _wait(prefill, demand.computed_rate / num_prefill, prompt_s, demand, slo)
    return DisaggregatedPools(
        num_prefill=num_prefill,
        num_decode=pool.num_replicas,
        num_devices=num_prefill * prefill.layout.num_devices + pool.num_devices,
        prefill_s=prompt_s,
        transfer_s=transfer_s,
        ttft_s=wait_s + prompt_s + transfer_s,
        tpot_s=pool.tpot_s,
        decode_batch=pool.batch,
        prefill_layout=prefill.layout,
        decode_layout=pool.machine.layout,
    )


def _wait(machine: Replica, rate: float, prompt_s: float, demand: Demand, slo: Slo) -> float:
    # A prompt passes through pp stages, each of which accepts the next prompt when it is done.
    layout = machine.layout
    stage_s = prompt_s / layout.pp
    return wait_quantile(rate / layout.num_attention, stage_s, slo.attainment, demand.input_cv2)


def _prefill_rate(
    machine: Replica, prompt_s: float, demand: Demand, slo: Slo, left_s: float
) -> float:
    """The highest request rate at which a prefill replica completes prompts within `left_s`."""
    if prompt_s > left_s:
        return 0.0
    low, high = 0.0, 0.95 / prompt_s * machine.layout.pp * machine.layout.num_attention
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        fits = _wait(machine, rate, prompt_s, demand, slo) + prompt_s <= left_s
        low, high = (rate, high) if fits else (low, rate)
    return low


def _decode_batches(machine: Replica, demand: Demand) -> Iterator[int]:
    """Mean batches whose answers fit a decode replica's cache with three deviations to spare."""
    needs = cache_needs(machine, demand)
    for batch in batch_sizes():
        num_seqs = math.ceil(batch + 3 * math.sqrt(batch))
        limits = MemoryLimits(max_num_batched_tokens=num_seqs, max_num_seqs=num_seqs)
        kv_tokens = needs.room(memory_budget(machine, limits).kv_tokens)
        if kv_tokens < num_seqs * needs.per_request:
            return
        yield batch


def _point(demand: Demand, batch: int) -> OperatingPoint:
    return OperatingPoint(model="", device="", isl=demand.isl, osl=demand.osl, batch=batch)


def judge_disaggregation(
    machines: Sequence[Replica], demand: Demand, slo: Slo, shared: Candidate | None
) -> DisaggregationVerdict:
    """Compare the smallest pools of these layouts (of one device and formats) with `shared`, the
    best fleet of the first of them that serves prefill and decode together (None: there is none).
    """
    split = smallest_pools(machines, demand, slo)
    transfer_s = transfer_seconds(machines[0], demand)
    interference_s = None
    if shared is not None:
        interference_s = 1 / shared.tok_s_user - shared.decode_s
    yes, why = _decide(split, shared, transfer_s, interference_s)
    return DisaggregationVerdict(
        yes=yes,
        why=why,
        pools=split,
        shared_devices=None if shared is None else shared.num_devices,
        transfer_s=transfer_s,
        interference_s=interference_s,
    )


def _decide(
    split: DisaggregatedPools | None,
    shared: Candidate | None,
    transfer_s: float,
    interference_s: float | None,
) -> tuple[bool, str]:
    if split is None:
        return False, "no split of this device and these formats meets the SLO"
    pair = (
        f"{split.num_prefill} prefill ({split.prefill_layout}) + "
        f"{split.num_decode} decode replicas ({split.decode_layout})"
    )
    if shared is None or interference_s is None:
        return True, f"no shared fleet of this kind meets the SLO; {pair} do"
    why = (
        f"{pair} need {split.num_devices} devices, a shared fleet {shared.num_devices}; sending a "
        f"prompt's KV cache takes {rounded(transfer_s * 1000)} ms, prompts in decode steps cost "
        f"{rounded(interference_s * 1000)} ms per token"
    )
    return split.num_devices < shared.num_devices, why
