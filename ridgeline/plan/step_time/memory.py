"""What fits: the memory of one device, line by line, and the tokens of KV cache that are left.

    usable = memory · utilization
    KV     = usable - weights - activations - runtime, in whole blocks

The activation peak is that of the largest step: a few rows of hidden and inner size per token, and
one row of logits in float32 per sequence. `runtime` is what the driver, the communication library
and captured graphs take: 1 GB (0.5 to 1.5 GB are seen on CUDA devices).
"""

from __future__ import annotations

import msgspec

from ridgeline.engine.scheduler.kv.kv_budget import KvBudgetInputs, kv_budget
from ridgeline.errors import DoesNotFit
from ridgeline.modelspec.cost.parameters import largest_mlp
from ridgeline.plan.calibration.calibration import MachineMemory as Calibrated
from ridgeline.plan.step_time.replica import Replica

BLOCK_SIZE = 16
UTILIZATION = 0.9
RUNTIME_BYTES = 1_000_000_000
_ROWS_OF_HIDDEN = 6  # residual, normed input, q with k and v, attention's output, two buffers


class MemoryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the budget depends on besides the replica.

    `max_model_len` (None: the model's own) and `kv_bytes` (None: derived) are read on a calibrated
    device alone, where the engine's own rule decides.
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    utilization: float = UTILIZATION
    runtime_bytes: int = RUNTIME_BYTES
    block_size: int = BLOCK_SIZE
    max_model_len: int | None = None
    kv_bytes: int | None = None


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on ONE device, and `kv_tokens` that the whole replica can cache.

    `kv_bytes_per_token` is on one device, copies included; `kv_copies` says how often each number
    is held over the tp devices.
    """

    device_bytes: int
    usable_bytes: float
    weight_bytes: float
    activation_bytes: float
    runtime_bytes: float
    kv_bytes: float
    kv_bytes_per_token: float
    kv_copies: float
    kv_tokens: int

    def rows(self) -> tuple[tuple[str, float], ...]:
        """The arithmetic, top to bottom."""
        return (
            ("device memory", self.device_bytes),
            ("usable", self.usable_bytes),
            ("weights", self.weight_bytes),
            ("activations", self.activation_bytes),
            ("runtime", self.runtime_bytes),
            ("KV cache", self.kv_bytes),
        )


def memory_budget(machine: Replica, asked: MemoryLimits | None = None) -> MemoryBudget:
    """The table; `kv_tokens` is 0 where the weights leave nothing. Nothing is raised."""
    asked = MemoryLimits() if asked is None else asked
    if machine.calibration is not None:
        return _as_the_engine(machine, asked, machine.calibration.memory)
    layout = machine.layout
    usable = machine.device.memory_bytes * asked.utilization
    activations = _activations(machine, asked)
    left = usable - machine.resident_bytes - activations - asked.runtime_bytes
    per_token = machine.cost.kv_bytes_per_token / min(layout.tp, machine.num_kv_heads) / layout.pp
    blocks = max(0, int(left // (per_token * asked.block_size)))
    return MemoryBudget(
        device_bytes=machine.device.memory_bytes,
        usable_bytes=usable,
        weight_bytes=machine.resident_bytes,
        activation_bytes=activations,
        runtime_bytes=asked.runtime_bytes,
        kv_bytes=max(0.0, left),
        kv_bytes_per_token=per_token,
        kv_copies=machine.kv_copies,
        kv_tokens=blocks * asked.block_size * layout.num_attention,
    )


def _as_the_engine(machine: Replica, asked: MemoryLimits, found: Calibrated) -> MemoryBudget:
    """What Ridgeline's engine would resolve to on this machine; no cache where it would refuse."""
    per_token = machine.cost.kv_bytes_per_token
    rule = KvBudgetInputs(
        weight_bytes=int(machine.resident_bytes),
        kv_bytes_per_token=per_token,
        max_model_len=asked.max_model_len or machine.spec.max_positions,
        max_num_seqs=asked.max_num_seqs,
        block_size=asked.block_size,
        memory_bytes=found.total_bytes,
        available_bytes=found.available_bytes,
        device="cpu",
        requested_bytes=asked.kv_bytes,
    )
    nbytes, blocks = _budget(rule, shorter=asked.max_model_len is None)
    return MemoryBudget(
        device_bytes=found.total_bytes,
        usable_bytes=found.available_bytes,
        weight_bytes=machine.resident_bytes,
        activation_bytes=0.0,
        runtime_bytes=0.0,
        kv_bytes=nbytes,
        kv_bytes_per_token=per_token,
        kv_copies=1.0,
        kv_tokens=blocks * asked.block_size,
    )


def _budget(rule: KvBudgetInputs, *, shorter: bool) -> tuple[int, int]:
    """(bytes, blocks) of the cache. `shorter`: where a sequence of the model's own limit does not
    fit, half of it may, and so on, as the engine would ask its user to say."""
    while True:
        try:
            budget = kv_budget(rule)
        except DoesNotFit:
            if not shorter or rule.max_model_len <= rule.block_size:
                return 0, 0
            rule = msgspec.structs.replace(rule, max_model_len=rule.max_model_len // 2)
        else:
            return budget.nbytes, budget.num_blocks


def _activations(machine: Replica, asked: MemoryLimits) -> float:
    spec, tp = machine.spec, machine.layout.tp
    act_bytes = 4 if machine.head_dtype == "float32" else 2
    per_token = _ROWS_OF_HIDDEN * spec.hidden_size + 2 * largest_mlp(spec) / tp
    logits = asked.max_num_seqs * spec.vocab_size * 4 / tp
    return asked.max_num_batched_tokens * per_token * act_bytes + logits


def require_fit(machine: Replica, found: MemoryBudget, context: int, num_seqs: int = 1) -> None:
    """DoesNotFit unless `num_seqs` sequences of `context` tokens fit; windows counted."""
    whole = machine.cost.kv_bytes(context) / machine.cost.kv_bytes_per_token * num_seqs
    if whole <= found.kv_tokens:
        return
    gb = 1e9
    raise DoesNotFit(
        f"{machine.spec.name} with {num_seqs} x {context} tokens does not fit "
        f"{machine.layout.num_devices} x {machine.device.name}",
        value=f"weights {found.weight_bytes / gb:.1f} GB and KV for {whole:,.0f} tokens per device",
        limit=f"{found.usable_bytes / gb:.1f} GB usable, KV for {found.kv_tokens:,} tokens",
        fix="more devices (tp, pp, ep), a narrower weight or KV dtype, or fewer tokens",
    )
