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

import msgspec

from ridgeline.plan.demand import Demand, wait_quantile
from ridgeline.plan.layout import NETWORK_BYTES_S
from ridgeline.plan.machine import Replica
from ridgeline.plan.memory import MemoryAsked, memory
from ridgeline.plan.search import Candidate, batches
from ridgeline.records import Slo

_BISECTIONS = 40


class Pools(msgspec.Struct, frozen=True, kw_only=True):
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


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`yes` or no, why, and both sides' numbers; `pools` None where no split keeps the promise."""

    yes: bool
    why: str
    pools: Pools | None
    shared_devices: int | None
    transfer_s: float
    interference_s: float | None


def transfer_seconds(machine: Replica, demand: Demand) -> float:
    """A mean prompt's KV over the network, every device of the replica sending its share."""
    nbytes = machine.kv_bytes(demand.isl) * machine.kv_copies
    return nbytes / (NETWORK_BYTES_S * machine.layout.num_devices)


def pools(machine: Replica, demand: Demand, slo: Slo) -> Pools | None:
    """The smallest split of this replica kind that keeps the promise; None where there is none."""
    transfer_s = transfer_seconds(machine, demand)
    decode = _decode(machine, demand, slo, transfer_s)
    prompt = machine.uniform(1, demand.isl - demand.cached, demand.cached, sampled=1)
    rate = _prefill_rate(prompt.seconds, transfer_s, demand, slo)
    if decode is None or rate <= 0:
        return None
    batch, tpot_s, decode_rate = decode
    num_prefill = math.ceil(demand.rate / rate)
    num_decode = math.ceil(demand.rate / decode_rate)
    wait_s = _wait(demand.rate / num_prefill, prompt.seconds, demand, slo)
    return Pools(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_devices=(num_prefill + num_decode) * machine.layout.num_devices,
        prefill_s=prompt.seconds,
        transfer_s=transfer_s,
        ttft_s=wait_s + prompt.seconds + transfer_s,
        tpot_s=tpot_s,
        decode_batch=batch,
    )


def _wait(rate: float, service_s: float, demand: Demand, slo: Slo) -> float:
    return wait_quantile(rate, service_s, slo.attainment, demand.input_cv2)


def _prefill_rate(service_s: float, transfer_s: float, demand: Demand, slo: Slo) -> float:
    """Requests per second at which a prefill replica just keeps the TTFT."""
    limit_s = math.inf if slo.ttft_s is None else slo.ttft_s
    if service_s + transfer_s > limit_s:
        return 0.0
    low, high = 0.0, 0.95 / service_s
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        fits = _wait(rate, service_s, demand, slo) + service_s + transfer_s <= limit_s
        low, high = (rate, high) if fits else (low, rate)
    return low


def _decode(
    machine: Replica, demand: Demand, slo: Slo, transfer_s: float
) -> tuple[int, float, float] | None:
    """(mean batch, TPOT when one deviation busier, requests/s) of the fullest decode replica."""
    best = None
    per_request = machine.kv_bytes(demand.isl + demand.osl) / machine.kv_bytes_per_token
    context = demand.isl + demand.osl // 2
    for batch in batches():
        seats = math.ceil(batch + 3 * math.sqrt(batch))
        fits = memory(machine, MemoryAsked(max_num_batched_tokens=seats, max_num_seqs=seats))
        busier = math.ceil(batch + math.sqrt(batch))
        tpot_s = machine.uniform(busier, 1, context, sampled=busier).seconds
        e2e_s = demand.osl * tpot_s + transfer_s
        limits = (slo.tpot_s or math.inf, slo.e2e_s or math.inf)
        if fits.kv_tokens < seats * per_request or tpot_s > limits[0] or e2e_s > limits[1]:
            break
        best = (batch, tpot_s, batch / e2e_s)
    return best


def verdict(machine: Replica, demand: Demand, slo: Slo, shared: Candidate | None) -> Verdict:
    """`shared`: the best fleet of this kind whose replicas do both (None: there is none)."""
    split = pools(machine, demand, slo)
    transfer_s = transfer_seconds(machine, demand)
    interference_s = None
    if shared is not None:
        interference_s = 1 / shared.tok_s_user - shared.decode_s
    yes, why = _decide(split, shared, transfer_s, interference_s)
    return Verdict(
        yes=yes,
        why=why,
        pools=split,
        shared_devices=None if shared is None else shared.num_devices,
        transfer_s=transfer_s,
        interference_s=interference_s,
    )


def _decide(
    split: Pools | None, shared: Candidate | None, transfer_s: float, interference_s: float | None
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
