"""The memory budget of one device, and the tokens of KV cache that fit.

    usable = memory · utilization
    KV     = usable - weights - activations - runtime, in whole blocks

The activation peak is that of the largest step: a few rows of hidden and inner size per token, and
one row of float32 logits per sequence. `runtime` covers the driver, the communication library and
captured graphs: 1 GB (0.5 to 1.5 GB are observed on CUDA devices).
"""

from __future__ import annotations

import msgspec

from ridgeline.engine.scheduler.kv.eviction import SequenceEviction
from ridgeline.engine.scheduler.kv.kv_budget import KvBudgetInputs, fitting_model_len, kv_budget
from ridgeline.errors import BadInput, DoesNotFit
from ridgeline.modelspec.cost.kv_layout import KvLayout
from ridgeline.modelspec.cost.parameters import largest_mlp
from ridgeline.modelspec.model import ModelSpec
from ridgeline.plan.calibration.calibration import Calibration
from ridgeline.plan.step_time.replica import Replica
from ridgeline.records import KvEviction

BLOCK_SIZE = 16
UTILIZATION = 0.9
RUNTIME_BYTES = 1_000_000_000
_ROWS_OF_HIDDEN = 6  # residual, normed input, q with k and v, attention's output, two buffers


class MemoryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The engine limits that determine the memory budget.

    `max_model_len` (None: the model's limit) and `kv_bytes` (None: derived) are used only on a
    calibrated device, where the engine's own rule applies.
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

    `kv_blocks` is the size of the scheduler's pool, in blocks of one group of layers (`KvLayout`):
    with windows, a long sequence needs fewer blocks than its tokens. `kv_bytes_per_token` is on one
    device, including copies; `kv_copies` is the number of copies of each value over the tp devices.
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
    kv_blocks: int

    def rows(self) -> tuple[tuple[str, float], ...]:
        """The budget as (label, bytes) rows."""
        return (
            ("device memory", self.device_bytes),
            ("usable", self.usable_bytes),
            ("weights", self.weight_bytes),
            ("activations", self.activation_bytes),
            ("runtime", self.runtime_bytes),
            ("KV cache", self.kv_bytes),
        )


def memory_budget(machine: Replica, limits: MemoryLimits | None = None) -> MemoryBudget:
    """Compute the budget; `kv_tokens` is 0 if the weights leave no memory. Never raises."""
    limits = MemoryLimits() if limits is None else limits
    if machine.calibration is not None:
        return _engine_budget(machine, limits, machine.calibration)
    layout = machine.layout
    usable = machine.device.memory_bytes * limits.utilization
    activations = _activations(machine, limits)
    left = usable - machine.resident_bytes - activations - limits.runtime_bytes
    parts = machine.kv_parts * layout.pp
    per_token = machine.cost.kv_bytes_per_token / parts
    blocks = max(0, int(left // (machine.cost.layout.block_bytes(limits.block_size) / parts)))
    tokens = blocks // machine.cost.layout.num_groups * limits.block_size
    return MemoryBudget(
        device_bytes=machine.device.memory_bytes,
        usable_bytes=usable,
        weight_bytes=machine.resident_bytes,
        activation_bytes=activations,
        runtime_bytes=limits.runtime_bytes,
        kv_bytes=max(0.0, left),
        kv_bytes_per_token=per_token,
        kv_copies=machine.kv_copies,
        kv_tokens=tokens * layout.num_attention,
        kv_blocks=blocks * layout.num_attention,
    )


def _engine_budget(
    machine: Replica, limits: MemoryLimits, calibration: Calibration
) -> MemoryBudget:
    """The budget that Ridgeline's engine would choose here; no cache if it would fail."""
    memory = calibration.memory
    per_token = machine.cost.kv_bytes_per_token
    rule = KvBudgetInputs(
        weight_bytes=int(machine.resident_bytes),
        kv_bytes_per_token=per_token,
        max_model_len=limits.max_model_len or machine.spec.max_positions,
        max_num_seqs=limits.max_num_seqs,
        block_size=limits.block_size,
        memory_bytes=memory.total_bytes,
        available_bytes=memory.available_bytes,
        device="cpu" if calibration.device_kind == "cpu" else "cuda",
        requested_bytes=limits.kv_bytes,
        layout=machine.cost.layout,
        max_run_tokens=limits.max_num_batched_tokens,
    )
    if limits.max_model_len is None and limits.kv_bytes is None:
        rule = msgspec.structs.replace(rule, max_model_len=fitting_model_len(rule))
    try:
        budget = kv_budget(rule)
        nbytes, blocks = budget.nbytes, budget.num_blocks
    except DoesNotFit:
        nbytes, blocks = 0, 0
    return MemoryBudget(
        device_bytes=memory.total_bytes,
        usable_bytes=memory.available_bytes,
        weight_bytes=machine.resident_bytes,
        activation_bytes=0.0,
        runtime_bytes=0.0,
        kv_bytes=nbytes,
        kv_bytes_per_token=per_token,
        kv_copies=1.0,
        kv_tokens=blocks // machine.cost.layout.num_groups * limits.block_size,
        kv_blocks=blocks,
    )


def _activations(machine: Replica, limits: MemoryLimits) -> float:
    spec, tp = machine.spec, machine.layout.tp
    act_bytes = 4 if machine.head_dtype == "float32" else 2
    per_token = _ROWS_OF_HIDDEN * spec.hidden_size + 2 * largest_mlp(spec) / tp
    logits = limits.max_num_seqs * spec.vocab_size * 4 / tp
    return limits.max_num_batched_tokens * per_token * act_bytes + logits


def with_drafter(
    budget: MemoryBudget, weight_bytes: float, kv_share: float, layout: KvLayout, block_size: int
) -> MemoryBudget:
    """The budget where a drafter's weights take `weight_bytes` of each device, and its cache that
    share of the model's for each token. Weights stay those of the model."""
    if not (weight_bytes or kv_share) or budget.kv_bytes <= 0:
        return budget
    left, per_token = budget.kv_bytes - weight_bytes, budget.kv_bytes_per_token * (1 + kv_share)
    share = min(1.0, max(0.0, left) / per_token * budget.kv_bytes_per_token / budget.kv_bytes)
    blocks = int(budget.kv_tokens * share) // block_size
    return msgspec.structs.replace(
        budget, kv_tokens=blocks * block_size, kv_blocks=blocks * layout.num_groups
    )


def held_tokens(policy: KvEviction | None, num_prompt: int, num_tokens: int) -> int:
    """Tokens in the cache of a sequence that has computed `num_tokens`, under an eviction policy.

    Raises BadInput if the policy's budget is too small.
    """
    eviction = SequenceEviction.of(policy, num_prompt, BLOCK_SIZE)
    return num_tokens if eviction is None else num_tokens - eviction.dropped_at(num_tokens)


def require_context(spec: ModelSpec, *tokens: int) -> None:
    """Raise BadInput unless the model's context holds a request. `tokens`: its length, or those of
    its prompt and of its answer."""
    if sum(tokens) > spec.max_positions:
        raise BadInput(
            f"requests are longer than the context of {spec.name}",
            value=" + ".join(f"{num:,}" for num in tokens) + " tokens",
            limit=f"{spec.max_positions:,} tokens",
            fix="plan for shorter requests, or for a model with a longer context",
        )


def require_fit(machine: Replica, budget: MemoryBudget, context: int, num_seqs: int = 1) -> None:
    """Raise DoesNotFit unless `num_seqs` sequences of `context` tokens fit the KV cache.

    Layers with a window count with the blocks that they keep while the sequences decode.
    """
    needed = machine.cost.kv_tokens(context) * num_seqs
    if needed <= budget.kv_tokens:
        return
    gb = 1e9
    raise DoesNotFit(
        f"{machine.spec.name} with {num_seqs} x {context} tokens does not fit "
        f"{machine.layout.num_devices} x {machine.device.name}",
        value=f"weights {budget.weight_bytes / gb:.1f} GB and KV for {needed:,.0f} tokens per "
        "device",
        limit=f"{budget.usable_bytes / gb:.1f} GB usable, KV for {budget.kv_tokens:,} tokens",
        fix="use more devices (tp, pp, ep), a smaller weight or KV dtype, or fewer tokens",
    )
