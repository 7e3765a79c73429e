"""Should prompts and answers live on different devices? A verdict with its numbers.

Together, every prompt takes time out of the decodes that run beside it (`mixing`). Apart, that
interference is gone, and instead every prompt's KV cache crosses a link: bytes / rate added to the
time to first token. vLLM's own documentation says that disaggregation does not improve throughput;
it buys separate control of TTFT and of the gaps. So the verdict here is yes only where the pools
need fewer devices for the same promise, or where no shared fleet can keep it at all.

The pools use one replica kind (device, layout, formats). A prefill replica is an M/G/1 queue of
prompts; a decode replica holds as many sequences as TPOT and memory allow, one standard deviation
of the Poisson number in flight set aside, as in `search`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from ridgeline.plan.fleet.demand import Demand, wait_quantile
from ridgeline.plan.fleet.search import Candidate, batch_sizes
from ridgeline.plan.step_time.memory import MemoryLimits, memory_budget
from ridgeline.plan.step_time.parallel_layout import NETWORK_BYTES_S
from ridgeline.plan.step_time.predict import OperatingPoint, decode_step_s
from ridgeline.plan.step_time.replica import Replica
from ridgeline.records import Slo

_BISECTIONS = 40


class DisaggregatedPools(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of the two pools, and what they keep. Seconds."""

    num_prefill: int
    num_decode: int
    num_devices: int
    prefill_s: float
    transfer_s: float
    ttft_s: float
    tpot_s: float
    decode_batch: int

    @property
    def ratio(self) -> str:
        """prefill : decode, as small whole numbers."""
        common = math.gcd(self.num_prefill, self.num_decode)
        return f"{self.num_prefill // common}:{self.num_decode // common}"


class DisaggregationVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """`yes` or no, why, and both sides' numbers; `smallest_pools` None where no split keeps the promise."""

    yes: bool
    why: str
    pools: DisaggregatedPools | None
    shared_devices: int | None
    transfer_s: float
    interference_s: float | None


def transfer_seconds(machine: Replica, demand: Demand) -> float:
    """A mean prompt's KV over the network, every device of the replica sending its share."""
    nbytes = machine.cost.kv_bytes(demand.isl) * machine.kv_copies
    return nbytes / (NETWORK_BYTES_S * machine.layout.num_devices)


def smallest_pools(machine: Replica, demand: Demand, slo: Slo) -> DisaggregatedPools | None:
    """The smallest split of this replica kind that keeps the promise; None where there is none.

    Under a promise of e2e the pools share its time: what decoding leaves of it is the prompt's.
    """
    found = (_split(machine, demand, slo, batch) for batch in _decode_batches(machine, demand))
    fitting = [each for each in found if each is not None]
    return min(fitting, key=lambda each: (each.num_devices, each.tpot_s), default=None)


def _split(machine: Replica, demand: Demand, slo: Slo, batch: int) -> DisaggregatedPools | None:
    """With a mean of `batch` answers on each decode replica; TPOT is that when one deviation
    busier. None where the promise is broken."""
    transfer_s = transfer_seconds(machine, demand)
    prompt_s = machine.uniform(1, demand.isl - demand.cached, demand.cached, sampled=1).seconds
    tpot_s = decode_step_s(machine, _point(demand, math.ceil(batch + math.sqrt(batch))))
    held_s = demand.osl * tpot_s + transfer_s  # one token more: the step under way when it comes
    if demand.osl > 1 and tpot_s > (slo.tpot_s or math.inf):
        return None
    left_s = min(
        math.inf if slo.ttft_s is None else slo.ttft_s - transfer_s,
        math.inf if slo.e2e_s is None else slo.e2e_s - held_s,
    )
    rate = _prefill_rate(machine, prompt_s, demand, slo, left_s)
    if rate <= 0:
        return None
    num_prefill = math.ceil(demand.rate / rate)
    num_decode = math.ceil(demand.rate * held_s / batch)
    wait_s = _wait(machine, demand.rate / num_prefill, prompt_s, demand, slo)
    return DisaggregatedPools(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_devices=(num_prefill + num_decode) * machine.layout.num_devices,
        prefill_s=prompt_s,
        transfer_s=transfer_s,
        ttft_s=wait_s + prompt_s + transfer_s,
        tpot_s=tpot_s,
        decode_batch=batch,
    )


def _wait(machine: Replica, rate: float, prompt_s: float, demand: Demand, slo: Slo) -> float:
    """A prompt passes through pp stages, each of which takes the next one when it is done."""
    layout = machine.layout
    stage_s = prompt_s / layout.pp
    return wait_quantile(rate / layout.num_attention, stage_s, slo.attainment, demand.input_cv2)


def _prefill_rate(
    machine: Replica, prompt_s: float, demand: Demand, slo: Slo, left_s: float
) -> float:
    """Requests per second at which prompts on a prefill replica are just done within `left_s`."""
    if prompt_s > left_s:
        return 0.0
    low, high = 0.0, 0.95 / prompt_s * machine.layout.pp * machine.layout.num_attention
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        fits = _wait(machine, rate, prompt_s, demand, slo) + prompt_s <= left_s
        low, high = (rate, high) if fits else (low, rate)
    return low


def _decode_batches(machine: Replica, demand: Demand) -> Iterator[int]:
    """Those whose answers fit a decode replica's cache, three deviations above the mean."""
    per_request = machine.cost.kv_bytes(demand.isl + demand.osl) / machine.cost.kv_bytes_per_token
    for batch in batch_sizes():
        seats = math.ceil(batch + 3 * math.sqrt(batch))
        asked = MemoryLimits(max_num_batched_tokens=seats, max_num_seqs=seats)
        if memory_budget(machine, asked).kv_tokens < seats * per_request:
            return
        yield batch


def _point(demand: Demand, batch: int) -> OperatingPoint:
    return OperatingPoint(model="", device="", isl=demand.isl, osl=demand.osl, batch=batch)


def judge_disaggregation(
    machine: Replica, demand: Demand, slo: Slo, shared: Candidate | None
) -> DisaggregationVerdict:
    """`shared`: the best fleet of this kind whose replicas do both (None: there is none)."""
    split = smallest_pools(machine, demand, slo)
    transfer_s = transfer_seconds(machine, demand)
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
        return False, "no split of this replica kind keeps the promise"
    pair = f"{split.num_prefill} prefill + {split.num_decode} decode replicas ({split.ratio})"
    if shared is None or interference_s is None:
        return True, f"no shared fleet of this kind keeps the promise; {pair} do"
    told = (
        f"{pair} take {split.num_devices} devices, a shared fleet {shared.num_devices}; moving a "
        f"prompt's KV costs {transfer_s * 1000:.3g} ms, prompts beside decodes cost "
        f"{interference_s * 1000:.3g} ms per token"
    )
    return split.num_devices < shared.num_devices, told
