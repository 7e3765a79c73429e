"""One replica as the predictions see it: what a step costs on its devices, and what fits on them.

    t = max(bytes / (bandwidth · share), FLOPs / (peak · share)) + overhead + communication

Bytes and FLOPs are those of ONE device: matrices and heads divided by tp, experts by ep (or tp),
the KV cache by min(tp, KV heads): with more devices than KV heads every head is held several times.
Experts are read as far as a step's tokens are expected to touch them. A pass through pipeline
stages takes as long as one through all layers on one stage: the stages only divide the memory, and
let several micro-batches be under way at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.plan.efficiency import Efficiency, efficiency_of
from ridgeline.plan.formats import KV_BYTES, KV_ROW_SCALE_BYTES, WEIGHTS, WeightFormat
from ridgeline.plan.layout import Layout, Wires, check_layout, wires
from ridgeline.plan.outline import Attention, Experts, Outline
from ridgeline.spec.cost import visible

Bound = Literal["bandwidth", "compute", "overhead", "communication"]
Shapes = Sequence[tuple[int, int]]


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """One step on one device. Of the seconds for memory and for compute the larger counts."""

    weight_bytes: float
    kv_bytes: float
    flops: float
    memory_s: float
    compute_s: float
    overhead_s: float
    communication_s: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s) + self.overhead_s + self.communication_s

    @property
    def bound(self) -> Bound:
        """The largest part of the time."""
        parts: dict[Bound, float] = {
            "bandwidth": self.memory_s,
            "compute": self.compute_s,
            "overhead": self.overhead_s,
            "communication": self.communication_s,
        }
        return max(parts, key=lambda name: parts[name])


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A model in its formats on the devices of one layout; build it with `replica`."""

    outline: Outline
    device: Accelerator
    layout: Layout
    weight_dtype: str
    kv_dtype: str
    compute_dtype: str
    peak_flop_s: float
    efficiency: Efficiency
    wires: Wires
    shared_bytes: float
    head_bytes: float
    expert_bytes: tuple[float, ...]
    resident_bytes: float
    linear_flops: float
    head_flops: float

    def price(self, shapes: Shapes, num_sampled: int) -> StepCost:
        """One step of runs (new tokens, tokens computed before) of one attention group."""
        num_tokens = sum([new for new, _ in shapes])
        kv_bytes = flops = 0.0
        for group in self.outline.attention:
            pairs, span = visible(shapes, group.window)
            flops += group.num_layers * group.flops_per_pair * pairs
            kv_bytes += self._kv_row(group) * (group.num_layers * span)
            kv_bytes += self._kv_row(group) * (group.num_cached * num_tokens)
            extra = group.decode_flops_per_pair - group.flops_per_pair
            if extra:
                decoding = [shape for shape in shapes if shape[0] == 1]
                flops += group.num_layers * extra * visible(decoding, group.window)[0]
        return self._cost(num_tokens, num_sampled, len(shapes), kv_bytes, flops)

    def uniform(self, batch: int, new: int, done: int, *, sampled: int) -> StepCost:
        """`price` of `batch` equal runs, at the cost of one."""
        return self.grouped(((batch, new, done),), sampled)

    def grouped(self, runs: Sequence[tuple[int, int, int]], num_sampled: int) -> StepCost:
        """`price` of runs (how many alike, new tokens, tokens computed before)."""
        kv_bytes = flops = 0.0
        for group in self.outline.attention:
            row = self._kv_row(group)
            for count, new, done in runs:
                pairs, span = visible(((new, done),), group.window)
                per_pair = group.decode_flops_per_pair if new == 1 else group.flops_per_pair
                flops += count * group.num_layers * per_pair * pairs
                kv_bytes += count * row * (group.num_layers * span + group.num_cached * new)
        num_tokens = sum([count * new for count, new, _ in runs])
        num_runs = sum([count for count, _, _ in runs])
        return self._cost(num_tokens, num_sampled, num_runs, kv_bytes, flops)

    def decode_sum(self, batch: int, computed: int) -> StepCost:
        """A decode step of `batch` sequences that hold `computed` tokens together; no windows."""
        kv_bytes = flops = 0.0
        for group in self.outline.attention:
            seen = computed + batch  # each new token sees itself too
            flops += group.num_layers * group.decode_flops_per_pair * seen
            kv_bytes += self._kv_row(group) * (group.num_layers * seen + group.num_cached * batch)
        return self._cost(batch, batch, batch, kv_bytes, flops)

    def _cost(
        self, num_tokens: int, num_sampled: int, num_runs: int, kv_bytes: float, flops: float
    ) -> StepCost:
        """`kv_bytes` of all heads, `flops` of all attention: divided here."""
        layout, eff = self.layout, self.efficiency
        weight_bytes = self.shared_bytes + (self.head_bytes if num_sampled else 0.0)
        reached = num_tokens * layout.num_attention
        for group, nbytes in zip(self.outline.experts, self.expert_bytes, strict=True):
            weight_bytes += nbytes * _touched(group, reached)
        kv_bytes /= min(layout.tp, self.outline.num_kv_heads)
        flops = flops / layout.tp + self.linear_flops * num_tokens + self.head_flops * num_sampled
        return StepCost(
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            flops=flops,
            memory_s=(weight_bytes + kv_bytes) / (self.device.bandwidth_bytes_s * eff.bandwidth),
            compute_s=flops / (self.peak_flop_s * eff.compute),
            overhead_s=eff.step_s + eff.layer_s * self.outline.num_layers + eff.run_s * num_runs,
            communication_s=self.wires.seconds(num_tokens),
        )

    def _kv_row(self, group: Attention) -> float:
        """Bytes that one token takes in one layer's cache, all heads."""
        scales = group.kv_rows * KV_ROW_SCALE_BYTES.get(self.kv_dtype, 0)
        return group.kv_numbers * KV_BYTES[self.kv_dtype] + scales

    def kv_bytes(self, context: int) -> float:
        """Cache of one sequence of `context` tokens over the whole model, held once."""
        return sum(
            self._kv_row(group) * group.num_cached * min(context, group.window or context)
            for group in self.outline.attention
        )

    @property
    def kv_bytes_per_token(self) -> float:
        """What one more token takes, windows not yet full; the whole model, held once."""
        return sum(self._kv_row(group) * group.num_cached for group in self.outline.attention)

    @property
    def kv_copies(self) -> float:
        """How often each cached number is held: tp over the parts that the cache has."""
        return self.layout.tp / min(self.layout.tp, self.outline.num_kv_heads)


def _touched(group: Experts, num_tokens: int) -> float:
    """Expected distinct experts of a layer that `num_tokens` tokens choose under even routing."""
    return group.num_experts * (1 - (1 - group.per_token / group.num_experts) ** num_tokens)


def replica(
    outline: Outline,
    device: Accelerator,
    layout: Layout | None = None,
    *,
    weight_dtype: str | None = None,
    kv_dtype: str | None = None,
    efficiency: Efficiency | None = None,
) -> Replica:
    """Formats default to the checkpoint's. Raises BadInput or CannotRun for what cannot be."""
    layout = Layout() if layout is None else layout
    check_layout(layout, outline, device)
    stored = outline.stored_dtype
    weight_dtype = weight_dtype or outline.packed or stored
    form, wide = WEIGHTS[weight_dtype], WEIGHTS[stored]
    compute_dtype = _computed_in(form, device)
    eff = efficiency_of(device) if efficiency is None else efficiency
    act_bytes = 4 if stored == "float32" else 2
    head = outline.head_params
    shared = form.nbytes(outline.shared_params, outline.shared_rows)
    shared += outline.small_params * wide.bits / 8
    spread = layout.ep if layout.ep > 1 else layout.tp
    experts = tuple(g.num_layers * form.nbytes(g.params, g.rows) for g in outline.experts)
    routed = sum(n * g.num_experts for n, g in zip(experts, outline.experts, strict=True))
    tables = wide.nbytes(head, outline.vocab_size) * (1 if outline.tied_embeddings else 2)
    active = sum(g.num_layers * g.per_token * g.params for g in outline.experts)
    return Replica(
        outline=outline,
        device=device,
        layout=layout,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype or stored,
        compute_dtype=compute_dtype,
        peak_flop_s=device.peak(compute_dtype),
        efficiency=eff,
        wires=wires(layout, outline, device.link_bytes_s or 1.0, eff.collective_s, act_bytes),
        shared_bytes=shared / layout.tp,
        head_bytes=wide.nbytes(head, outline.vocab_size) / layout.tp,
        expert_bytes=tuple(nbytes / spread for nbytes in experts),
        resident_bytes=((shared + tables) / layout.tp + routed / spread) / layout.pp,
        linear_flops=2 * (outline.shared_params + active) / layout.tp,
        head_flops=2 * head / layout.tp,
    )


def _computed_in(form: WeightFormat, device: Accelerator) -> str:
    for dtype in form.computed_in:
        if dtype in device.peak_flops:
            return dtype
    raise BadInput(
        f"no dense peak of {device.name} is known for this weight format",
        value=form.computed_in[0],
        limit=", ".join(device.peak_flops) or "none",
    )
