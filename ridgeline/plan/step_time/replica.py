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

from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.modelspec.cost import LARGE_PARAMS, visible
from ridgeline.modelspec.cost.serving_formats import (
    KV_BYTES,
    KV_ROW_SCALE_BYTES,
    WEIGHTS,
    WeightFormat,
)
from ridgeline.plan.calibration.calibration import (
    CalibratedWork,
    Calibration,
    MeasuredDevice,
    Part,
    Priced,
)
from ridgeline.plan.calibration.published_efficiency import Efficiency, efficiency_of
from ridgeline.plan.model.outline import Attention, Experts, Outline
from ridgeline.plan.model.weight_bytes import layer_bytes, served_dtype, shared_form, table_bytes
from ridgeline.plan.step_time.parallel_layout import Layout, Wires, check_layout, wires
from ridgeline.roofline import Peaks, Work, bound

Bound = Literal["bandwidth", "compute", "overhead", "communication"]
Shapes = Sequence[tuple[int, int]]


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """One step on one device. `busy_s`: memory and compute as they overlap; the larger of the two
    where nothing was measured."""

    weight_bytes: float
    kv_bytes: float
    flops: float
    memory_s: float
    compute_s: float
    busy_s: float
    overhead_s: float
    communication_s: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def seconds(self) -> float:
        return self.busy_s + self.overhead_s + self.communication_s

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


class Attended(msgspec.Struct, frozen=True):
    """Attention of a step, all heads: decodes (one new token) and the rest; FLOPs and KV bytes.

    What decodes read is a multiple of their FLOPs, so that the time of both is straight in the
    tokens that they see; what they write is `written_bytes`.
    """

    decode_flops: float
    decode_kv_bytes: float
    fresh_flops: float
    fresh_kv_bytes: float
    written_bytes: float
    num_begun: int


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A model in its formats on the devices of one layout; build it with `replica`."""

    outline: Outline
    device: Accelerator
    layout: Layout
    weight_dtype: str
    kv_dtype: str
    compute_dtype: str
    peaks: Peaks
    efficiency: Efficiency
    wires: Wires
    shared_bytes: float
    head_bytes: float
    expert_bytes: tuple[float, ...]
    resident_bytes: float
    linear_flops: float
    head_flops: float
    head_dtype: str
    calibration: Calibration | None = None

    def price(self, shapes: Shapes, num_sampled: int) -> StepCost:
        """One step of runs (new tokens, tokens computed before) of one attention group."""
        num_tokens = sum([new for new, _ in shapes])
        decoding = [shape for shape in shapes if shape[0] == 1]
        fresh = [shape for shape in shapes if shape[0] != 1] if len(decoding) < len(shapes) else []
        decode_bytes = fresh_bytes = written_bytes = decode_flops = fresh_flops = 0.0
        for group in self.outline.attention:
            row = self._kv_row(group)
            pairs, span = visible(decoding, group.window)
            decode_flops += group.num_layers * group.decode_flops_per_pair * pairs
            decode_bytes += row * group.num_layers * span
            written_bytes += row * group.num_cached * len(decoding)
            if fresh:
                pairs, span = visible(fresh, group.window)
                fresh_flops += group.num_layers * group.flops_per_pair * pairs
                new = num_tokens - len(decoding)
                fresh_bytes += row * (group.num_layers * span + group.num_cached * new)
        begun = sum([done == 0 for _, done in fresh])
        attended = Attended(
            decode_flops, decode_bytes, fresh_flops, fresh_bytes, written_bytes, begun
        )
        return self._cost(num_tokens, num_sampled, len(shapes), attended)

    def uniform(self, batch: int, new: int, done: int, *, sampled: int) -> StepCost:
        """`price` of `batch` equal runs, at the cost of one."""
        return self.grouped(((batch, new, done),), sampled)

    def grouped(self, runs: Sequence[tuple[int, int, int]], num_sampled: int) -> StepCost:
        """`price` of runs (how many alike, new tokens, tokens computed before)."""
        num_tokens = sum([count * new for count, new, _ in runs])
        num_runs = sum([count for count, _, _ in runs])
        return self._cost(num_tokens, num_sampled, num_runs, self._attended(runs))

    def _attended(self, runs: Sequence[tuple[int, int, int]]) -> Attended:
        decode_bytes = fresh_bytes = written_bytes = decode_flops = fresh_flops = 0.0
        for group in self.outline.attention:
            row = self._kv_row(group)
            for count, new, done in runs:
                pairs, span = visible(((new, done),), group.window)
                read, written = group.num_layers * span, group.num_cached * new
                if new == 1:
                    decode_flops += count * group.num_layers * group.decode_flops_per_pair * pairs
                    decode_bytes += count * row * read
                    written_bytes += count * row * written
                else:
                    fresh_flops += count * group.num_layers * group.flops_per_pair * pairs
                    fresh_bytes += count * row * (read + written)
        begun = sum([count for count, new, done in runs if done == 0 and new != 1])
        return Attended(decode_flops, decode_bytes, fresh_flops, fresh_bytes, written_bytes, begun)

    def decode_sum(self, batch: int, computed: int) -> StepCost:
        """A decode step of `batch` sequences that hold `computed` tokens together; no windows."""
        read = written = flops = 0.0
        for group in self.outline.attention:
            seen = computed + batch  # each new token sees itself too
            flops += group.num_layers * group.decode_flops_per_pair * seen
            read += self._kv_row(group) * group.num_layers * seen
            written += self._kv_row(group) * group.num_cached * batch
        return self._cost(batch, batch, batch, Attended(flops, read, 0.0, 0.0, written, 0))

    def _cost(
        self, num_tokens: int, num_sampled: int, num_runs: int, attended: Attended
    ) -> StepCost:
        """`attended`: of all heads, divided here."""
        layout, eff = self.layout, self.efficiency
        weight_bytes = self.shared_bytes + (self.head_bytes if num_sampled else 0.0)
        reached = num_tokens * layout.num_attention
        for group, nbytes in zip(self.outline.experts, self.expert_bytes, strict=True):
            weight_bytes += nbytes * _touched(group, reached)
        kv_bytes = attended.decode_kv_bytes + attended.fresh_kv_bytes + attended.written_bytes
        kv_bytes /= min(layout.tp, self.outline.num_kv_heads)
        flops = (attended.decode_flops + attended.fresh_flops) / layout.tp
        flops += self.linear_flops * num_tokens + self.head_flops * num_sampled
        if self.calibration is not None:
            priced = self.calibration.priced(
                self._work(num_tokens, num_sampled, num_runs, attended)
            )
        else:
            least = bound(Work(flops, weight_bytes + kv_bytes), self.peaks)
            memory_s, compute_s = least.bandwidth_s / eff.bandwidth, least.compute_s / eff.compute
            overhead_s = eff.step_s + eff.layer_s * self.outline.num_layers + eff.run_s * num_runs
            priced = Priced(memory_s, compute_s, max(memory_s, compute_s), overhead_s)
        return StepCost(
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            flops=flops,
            memory_s=priced.memory_s,
            compute_s=priced.compute_s,
            busy_s=priced.busy_s,
            overhead_s=priced.overhead_s,
            communication_s=self.wires.seconds(num_tokens),
        )

    def work(self, shapes: Shapes, num_sampled: int) -> CalibratedWork:
        """What `price` prices, before anything is timed: for one device."""
        runs = [(1, new, done) for new, done in shapes]
        num_tokens = sum([new for new, _ in shapes])
        return self._work(num_tokens, num_sampled, len(shapes), self._attended(runs))

    def _work(
        self, num_tokens: int, num_sampled: int, num_runs: int, attended: Attended
    ) -> CalibratedWork:
        outline = self.outline
        parts = [
            Part(self.weight_dtype, outline.shared_params, self.shared_bytes, num_tokens),
        ]
        for group, nbytes in zip(outline.experts, self.expert_bytes, strict=True):
            met = _touched(group, num_tokens)
            rows = num_tokens * group.per_token / met
            weights = group.num_layers * met * group.params
            parts.append(Part(self.weight_dtype, weights, nbytes * met, rows))
        if num_sampled:
            parts.append(Part(self.head_dtype, outline.head_params, self.head_bytes, num_sampled))
        outputs = outline.shared_rows + sum(
            [g.num_layers * g.per_token * g.rows for g in outline.experts]
        )
        return CalibratedWork(
            parts=tuple(parts),
            weight_set_bytes=sum([part.nbytes for part in parts]),
            decode_flops=attended.decode_flops,
            decode_kv_bytes=attended.decode_kv_bytes,
            fresh_flops=attended.fresh_flops,
            layer_format=self.weight_dtype,
            num_layers=outline.num_layers,
            num_runs=num_runs,
            num_begun=attended.num_begun,
            num_logits=num_sampled * outline.vocab_size,
            num_outputs=num_tokens * outputs,
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
    """Formats default to the checkpoint's; on a measured device, to what its engine makes of it.

    Raises BadInput or CannotRun for what cannot be.
    """
    layout = Layout() if layout is None else layout
    calibration = device.calibration if isinstance(device, MeasuredDevice) else None
    check_layout(layout, outline, device)
    kept = served_dtype(outline, device, weight_dtype)
    weight_dtype = weight_dtype or outline.packed or _kept_weights(outline, kept, calibration)
    head_dtype = kept
    if calibration is not None:
        head_dtype = _head_dtype(outline, weight_dtype, calibration)
        _check_calibrated(calibration, layout, (weight_dtype, head_dtype))
    compute_dtype = _computed_in(shared_form(outline, weight_dtype, kept), device)
    if calibration is not None and weight_dtype in ("int8", "int4"):
        compute_dtype = "int8" if "int8" in device.peak_flops else compute_dtype
    eff = _errors(calibration) if calibration is not None else efficiency or efficiency_of(device)
    act_bytes = 4 if kept == "float32" else 2
    head_bytes = WEIGHTS[head_dtype].nbytes(outline.head_params, outline.vocab_size)
    shared, experts, routed = layer_bytes(outline, weight_dtype, kept)
    spread = layout.ep if layout.ep > 1 else layout.tp
    is_one = outline.tied_embeddings and (calibration is None or head_dtype == kept)
    tables = head_bytes + (0.0 if is_one else table_bytes(outline, kept))
    active = sum(g.num_layers * g.per_token * g.params for g in outline.experts)
    return Replica(
        outline=outline,
        device=device,
        layout=layout,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype or kept,
        compute_dtype=compute_dtype,
        peaks=Peaks(
            flops_s=device.peak(compute_dtype),
            bytes_s=device.bandwidth_bytes_s,
            dtype=compute_dtype,
            source=device.name,
        ),
        efficiency=eff,
        wires=wires(layout, outline, device.link_bytes_s or 1.0, eff.collective_s, act_bytes),
        shared_bytes=shared / layout.tp,
        head_bytes=head_bytes / layout.tp,
        expert_bytes=tuple(nbytes / spread for nbytes in experts),
        resident_bytes=((shared + tables) / layout.tp + routed / spread) / layout.pp,
        linear_flops=2 * (outline.shared_params + active) / layout.tp,
        head_flops=2 * outline.head_params / layout.tp,
        head_dtype=head_dtype,
        calibration=calibration,
    )


def _kept_weights(outline: Outline, kept: str, calibration: Calibration | None) -> str:
    """Ridgeline's engine leaves the weights of a large bfloat16 checkpoint as they are."""
    large = outline.num_params >= LARGE_PARAMS and outline.stored_dtype == "bfloat16"
    return "bfloat16" if calibration is not None and large else kept


def _errors(calibration: Calibration) -> Efficiency:
    """Of a calibrated device only the errors and their source are read."""
    return Efficiency(
        bandwidth=1.0,
        compute=1.0,
        step_s=0.0,
        layer_s=0.0,
        run_s=0.0,
        collective_s=0.0,
        tpot_error=calibration.tpot_error,
        ttft_error=calibration.ttft_error,
        source=calibration.source,
        as_of=calibration.as_of,
    )


def _head_dtype(outline: Outline, weight_dtype: str, calibration: Calibration) -> str:
    """Ridgeline's engine keeps what it does not quantise in its dense dtype, but the head of a
    quantised bfloat16 checkpoint as it is stored."""
    dense, stored = calibration.dense_dtype, outline.stored_dtype
    quantised = weight_dtype != dense
    return stored if quantised and (stored, dense) == ("bfloat16", "float32") else dense


def _check_calibrated(calibration: Calibration, layout: Layout, formats: tuple[str, ...]) -> None:
    if layout.num_devices > 1:
        raise CannotRun("one device was calibrated", value=str(layout), limit="tp1")
    for name in formats:
        calibration.linear(name)


def _computed_in(form: WeightFormat, device: Accelerator) -> str:
    for dtype in form.computed_in:
        if dtype in device.peak_flops:
            return dtype
    raise BadInput(
        f"no dense peak of {device.name} is known for this weight format",
        value=form.computed_in[0],
        limit=", ".join(device.peak_flops) or "none",
    )
