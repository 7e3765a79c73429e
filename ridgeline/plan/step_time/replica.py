"""The cost of a step on one replica: a model in given formats on the devices of a layout.

    t = Σ over parts max(bytes / (bandwidth · share), FLOPs / (peak · share))
        + overhead + communication

The parts are the linears that every token uses, the routed experts, the LM head, attention, and the
hidden states that cross the memory between products; each has its own shares of the peaks
(`published_efficiency`). Grouped products of experts compute whole tiles of rows. Bytes and FLOPs
are those of ONE device: matrices and heads divided by tp, experts by all devices that share them,
the KV cache by min(tp, KV heads): with more devices than KV heads, each head is stored several
times. Only the experts that a step's tokens are expected to choose are read. A pass through all
pipeline stages takes as long as one stage with all layers would: stages divide the memory, and
allow several micro-batches in flight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from ridgeline.errors import CannotRun
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.modelspec.cost import LARGE_PARAMS, CostModel, Shape, num_params
from ridgeline.modelspec.cost.parameters import num_kv_heads
from ridgeline.modelspec.cost.serving_formats import (
    WIDE_DTYPES,
    dense_format,
    quantised_as,
    serving_cost,
    serving_format,
    table_bytes_in,
)
from ridgeline.modelspec.cost.step import AttentionWork, RunGroup
from ridgeline.modelspec.model import ModelSpec
from ridgeline.plan.calibration.calibration import (
    CalibratedWork,
    Calibration,
    MeasuredDevice,
    ProductWork,
    StepSeconds,
)
from ridgeline.plan.calibration.published_efficiency import Efficiency, efficiency_of
from ridgeline.plan.operators.step_operators import MeasuredParts, StepOperators
from ridgeline.plan.operators.tables import operator_tables
from ridgeline.plan.step_time.parallel_layout import (
    Communication,
    Layout,
    check_layout,
    communication,
)
from ridgeline.plan.step_time.part_rates import (
    PartRates,
    computed_in,
    part_rates,
    step_overhead_s,
)
from ridgeline.roofline import Peaks

Bound = Literal["bandwidth", "compute", "overhead", "communication"]


CACHE_READS, EXPERTS, PERMUTATION = "KV cache reads", "routed experts", "expert permutation"
PART_NAMES = (
    *("dense weights", EXPERTS, "LM head", CACHE_READS, "prompt attention"),
    *("activations", PERMUTATION),
)


class StepTerm(NamedTuple):
    """Seconds of one term of a step: of memory and of arithmetic, and what the term takes."""

    memory_s: float
    compute_s: float
    seconds: float


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one step on one device. `busy_s`: memory and compute time with their overlap; without
    a calibration, the larger of the two."""

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


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A model in its formats on the devices of one layout. Built by `build_replica`."""

    spec: ModelSpec
    cost: CostModel
    device: Accelerator
    layout: Layout
    weight_dtype: str
    kv_dtype: str
    compute_dtype: str
    peaks: Peaks
    rates: PartRates | None
    efficiency: Efficiency
    wires: Communication
    num_kv_heads: int
    shared_bytes: float
    head_bytes: float
    expert_bytes: tuple[float, ...]
    resident_bytes: float
    linear_flops: float
    expert_flops: float
    head_flops: float
    step_overhead_s: float
    head_dtype: str
    calibration: Calibration | None = None
    operators: StepOperators | None = None

    @property
    def tpot_error(self) -> float:
        """Median relative error to expect of a predicted TPOT."""
        routed = self.efficiency.routed_tpot_error if self.cost.experts else 0.0
        return max(self.efficiency.tpot_error, routed)

    def price(self, shapes: Sequence[Shape], num_sampled: int) -> StepCost:
        """One step of runs (new tokens, tokens computed before) of one attention group."""
        if self.operators is not None:
            return self.grouped([(1, new, done) for new, done in shapes], num_sampled)
        num_tokens = sum([new for new, _ in shapes])
        return self._price(num_tokens, num_sampled, len(shapes), self.cost.attention(shapes))

    def uniform(self, batch: int, new: int, done: int, *, sampled: int) -> StepCost:
        """`price` of `batch` equal runs, at the cost of one."""
        return self.grouped(((batch, new, done),), sampled)

    def grouped(self, groups: Sequence[RunGroup], num_sampled: int) -> StepCost:
        """`price` of groups of equal runs (number of runs, new tokens, tokens computed before)."""
        num_tokens = sum([count * new for count, new, _ in groups])
        num_runs = sum([count for count, _, _ in groups])
        attention = self.cost.attention_of_groups(groups)
        cost = self._price(num_tokens, num_sampled, num_runs, attention)
        return cost if self.operators is None else self._with_measured(cost, groups, num_sampled)

    def _with_measured(
        self, cost: StepCost, groups: Sequence[RunGroup], num_sampled: int
    ) -> StepCost:
        """The cost with the seconds of measured operators in place of the analytic ones."""
        terms = self.step_terms(groups, num_sampled)
        collectives = (terms.pop("collectives, latency"), terms.pop("collectives, bytes"))
        return msgspec.structs.replace(
            cost,
            busy_s=sum(terms[name].seconds for name in PART_NAMES),
            communication_s=sum(term.seconds for term in collectives),
        )

    def decode_sum(self, batch: int, computed: int) -> StepCost:
        """A decode step of `batch` sequences that hold `computed` tokens in all; no windows."""
        if self.operators is not None:
            return self.uniform(batch, 1, computed // batch, sampled=batch)
        return self._price(batch, batch, batch, self.cost.attention_of_decodes(batch, computed))

    def _price(
        self, num_tokens: int, num_sampled: int, num_runs: int, attention: AttentionWork
    ) -> StepCost:
        """`attention` is that of all heads and is divided over the devices here."""
        layout = self.layout
        routed_tokens = num_tokens * layout.num_attention
        expert_bytes = sum(
            [
                nbytes * group.expected_experts(routed_tokens)
                for group, nbytes in zip(self.cost.experts, self.expert_bytes, strict=True)
            ]
        )
        weight_bytes = self.shared_bytes + expert_bytes
        weight_bytes += self.head_bytes if num_sampled else 0.0
        kv_bytes = attention.kv_bytes / self.kv_parts
        flops = attention.flops / (layout.tp * layout.cp)
        flops += self.linear_flops * self._own_rows(num_tokens) + self.head_flops * num_sampled
        if self.calibration is not None:
            work = self._calibrated_work(num_tokens, num_sampled, num_runs, attention)
            priced = self.calibration.priced(work)
        else:
            assert self.rates is not None
            busy = self._busy(self.rates, num_tokens, num_sampled, attention, expert_bytes)
            overhead_s = self.step_overhead_s + self.efficiency.run_s * num_runs
            priced = StepSeconds(*busy, overhead_s)
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

    def _busy(
        self,
        rates: PartRates,
        num_tokens: int,
        num_sampled: int,
        attention: AttentionWork,
        expert_bytes: float,
    ) -> tuple[float, float, float]:
        """Seconds of memory, of arithmetic, and of both, as each part is bound by one of them."""
        memory_s = compute_s = busy_s = 0.0
        for part_s, arithmetic_s in self._part_seconds(
            rates, num_tokens, num_sampled, attention, expert_bytes
        ):
            memory_s += part_s
            compute_s += arithmetic_s
            busy_s += max(part_s, arithmetic_s)
        return memory_s, compute_s, busy_s

    def _part_seconds(
        self,
        rates: PartRates,
        num_tokens: int,
        num_sampled: int,
        attention: AttentionWork,
        expert_bytes: float,
    ) -> tuple[tuple[float, float], ...]:
        """(seconds of memory, of arithmetic) of each of `PART_NAMES`."""
        tp, cp = self.layout.tp, self.layout.cp
        own_rows = self._own_rows(num_tokens)
        dense_flops = (self.linear_flops - self.expert_flops) * own_rows
        expert_flops = self._expert_flops(num_tokens)
        layer_bytes, chosen_bytes = self._hidden_bytes(num_tokens)
        written = attention.written_bytes
        prompt_bytes = attention.prompt_read_bytes + written if attention.prompt_flops else 0.0
        decode_bytes = attention.kv_bytes - prompt_bytes
        return (
            (self.shared_bytes / rates.dense_bytes_s, dense_flops / rates.dense_flops_s),
            (expert_bytes / rates.expert_bytes_s, expert_flops / rates.expert_flops_s),
            (
                (self.head_bytes if num_sampled else 0.0) / rates.dense_bytes_s,
                self.head_flops * num_sampled / rates.head_flops_s,
            ),
            (
                decode_bytes / self.kv_parts / rates.kv_bytes_s,
                attention.decode_flops / (tp * cp) / rates.decode_flops_s,
            ),
            (
                prompt_bytes / self.kv_parts / rates.kv_bytes_s,
                attention.prompt_flops / (tp * cp) / rates.prompt_flops_s,
            ),
            (self.efficiency.activation_passes * layer_bytes / rates.hidden_bytes_s, 0.0),
            (self.efficiency.expert_passes * chosen_bytes / rates.hidden_bytes_s, 0.0),
        )

    def _expert_flops(self, num_tokens: int) -> float:
        """FLOPs of the routed experts on one device, in whole tiles of rows."""
        routed, tile = num_tokens * self.layout.num_attention, self.efficiency.expert_tile
        products = sum(
            [2 * g.num_layers * g.params * g.padded_rows(routed, tile) for g in self.cost.experts]
        )
        return products / self.layout.num_expert_devices

    def _hidden_bytes(self, num_tokens: int) -> tuple[float, float]:
        """Bytes of the hidden states of a step on one device, over all layers: those of its tokens,
        and those of the experts' inputs."""
        row = self.spec.hidden_size * (4 if self.head_dtype == "float32" else 2)
        layers = len(self.spec.layers) * self._own_rows(num_tokens) * row
        routed = num_tokens * self.layout.num_attention / self.layout.ep
        chosen = sum([g.num_layers * g.experts_per_token for g in self.cost.experts])
        return layers, chosen * routed * row

    def step_terms(self, groups: Sequence[RunGroup], num_sampled: int) -> dict[str, StepTerm]:
        """The terms of `grouped`, whose seconds add up to its seconds.

        A calibration times kernels together, so that a calibrated device has fewer terms.
        """
        num_tokens = sum(count * new for count, new, _ in groups)
        num_runs = sum(count for count, _, _ in groups)
        measured = None if self.operators is None else self.operators.parts(groups, num_sampled)
        terms = {}
        if self.rates is None:
            cost = self.grouped(groups, num_sampled)
            terms["kernels"] = StepTerm(cost.memory_s, cost.compute_s, cost.busy_s)
            terms["engine overhead"] = StepTerm(0.0, 0.0, cost.overhead_s)
        else:
            routed = num_tokens * self.layout.num_attention
            expert_bytes = sum(
                nbytes * group.expected_experts(routed)
                for group, nbytes in zip(self.cost.experts, self.expert_bytes, strict=True)
            )
            attention = self.cost.attention_of_groups(groups)
            parts = self._part_seconds(self.rates, num_tokens, num_sampled, attention, expert_bytes)
            for name, (memory_s, compute_s) in zip(PART_NAMES, parts, strict=True):
                terms[name] = StepTerm(memory_s, compute_s, max(memory_s, compute_s))
            if measured is not None:
                terms |= _with_measured_seconds(terms, measured, self.efficiency.measured_weight)
            terms["engine, per step and layer"] = StepTerm(0.0, 0.0, self.step_overhead_s)
            per_run_s = self.efficiency.run_s * num_runs
            terms["engine, per sequence"] = StepTerm(0.0, 0.0, per_run_s)
        fixed_s, per_token_s = self.wires.fixed_s, self.wires.per_token_s * num_tokens
        if measured is not None and measured.collectives_s is not None:
            total_s, weight = fixed_s + per_token_s, self.efficiency.measured_weight
            both_s = _weighted_mean(measured.collectives_s, total_s, weight)
            fixed_s = min(fixed_s, both_s)
            per_token_s = both_s - fixed_s
        terms["collectives, latency"] = StepTerm(0.0, 0.0, fixed_s)
        terms["collectives, bytes"] = StepTerm(0.0, 0.0, per_token_s)
        return terms

    def _own_rows(self, num_tokens: int) -> int:
        """Rows of a step that a device multiplies; those of experts are not divided."""
        return num_tokens if self.cost.experts else math.ceil(num_tokens / self.layout.cp)

    def calibrated_work(self, shapes: Sequence[Shape], num_sampled: int) -> CalibratedWork:
        """The work of a step on one device, by kernel, as calibrations time it."""
        num_tokens = sum([new for new, _ in shapes])
        groups = [(1, new, done) for new, done in shapes]
        attention = self.cost.attention_of_groups(groups)
        return self._calibrated_work(num_tokens, num_sampled, len(shapes), attention)

    def _calibrated_work(
        self, num_tokens: int, num_sampled: int, num_runs: int, attention: AttentionWork
    ) -> CalibratedWork:
        cost, vocab_size = self.cost, self.spec.vocab_size
        products = [
            ProductWork(self.weight_dtype, cost.linear_params, self.shared_bytes, num_tokens)
        ]
        for group, nbytes in zip(cost.experts, self.expert_bytes, strict=True):
            chosen = group.expected_experts(num_tokens)
            rows = num_tokens * group.experts_per_token / chosen
            weights = group.num_layers * chosen * group.params
            products.append(ProductWork(self.weight_dtype, weights, nbytes * chosen, rows))
        if num_sampled:
            head_params = vocab_size * self.spec.hidden_size
            products.append(ProductWork(self.head_dtype, head_params, self.head_bytes, num_sampled))
        outputs = cost.linear_outputs + sum(
            [g.num_layers * g.experts_per_token * g.outputs for g in cost.experts]
        )
        return CalibratedWork(
            products=tuple(products),
            weight_set_bytes=sum([product.nbytes for product in products]),
            decode_flops=attention.decode_flops,
            decode_kv_bytes=attention.decode_read_bytes,
            prompt_flops=attention.prompt_flops,
            layer_format=self.weight_dtype,
            num_layers=len(self.spec.layers),
            num_runs=num_runs,
            num_begun=attention.num_begun,
            num_logits=num_sampled * vocab_size,
            num_outputs=num_tokens * outputs,
        )

    @property
    def kv_parts(self) -> int:
        """Parts of a stage's KV cache, of which each device has one."""
        layout = self.layout
        return min(layout.tp, self.num_kv_heads) * layout.cp * layout.dcp

    @property
    def kv_copies(self) -> float:
        """Copies of each cached value: a stage's devices divided by the parts of its cache."""
        return self.layout.tp * self.layout.cp / self.kv_parts


def _with_measured_seconds(
    terms: Mapping[str, StepTerm], measured: MeasuredParts, weight: float
) -> dict[str, StepTerm]:
    """The parts of which there are measurements. Measured experts include their permutation."""
    found = {}
    for name, seconds in zip(PART_NAMES, measured[:-1], strict=False):
        if seconds is None:
            continue
        analytic_s = terms[name].seconds
        if name == EXPERTS:
            analytic_s += terms[PERMUTATION].seconds
            found[PERMUTATION] = terms[PERMUTATION]._replace(seconds=0.0)
        found[name] = terms[name]._replace(seconds=_weighted_mean(seconds, analytic_s, weight))
    return found


def _weighted_mean(measured_s: float, analytic_s: float, weight: float) -> float:
    """The mean in logarithms; 0 for what the model does not have."""
    if measured_s <= 0 or analytic_s <= 0:
        return analytic_s
    return float(measured_s**weight * analytic_s ** (1 - weight))


def build_replica(
    spec: ModelSpec,
    device: Accelerator,
    layout: Layout | None = None,
    *,
    weight_dtype: str | None = None,
    kv_dtype: str | None = None,
    efficiency: Efficiency | None = None,
    backend: str | None = None,
) -> Replica:
    """Place a model on devices.

    Formats default to the checkpoint's; on a calibrated device, to the engine's choice. `backend`:
    the engine whose overheads are used on a device without a calibration. Raises BadInput or
    CannotRun for a layout or format that the model or the device does not support.
    """
    layout = Layout() if layout is None else layout
    calibration = device.calibration if isinstance(device, MeasuredDevice) else None
    check_layout(layout, spec, device, weight_dtype)
    rest_dtype = served_dtype(spec, device, weight_dtype)
    weight_dtype = weight_dtype or _default_weights(spec, rest_dtype, calibration)
    head_dtype = rest_dtype
    if calibration is not None:
        head_dtype = _head_dtype(spec, weight_dtype, calibration)
        _check_calibrated(calibration, layout, (weight_dtype, head_dtype))
    compute_dtype = computed_in(dense_format(spec, weight_dtype, rest_dtype), device)
    if calibration is not None and weight_dtype in ("int8", "int4"):
        compute_dtype = "int8" if "int8" in device.peak_flops else compute_dtype
    eff = efficiency or _efficiency(device, calibration, backend)
    kv_dtype = kv_dtype or _default_kv(spec, rest_dtype, calibration)
    cost = serving_cost(spec, weight_dtype, rest_dtype, head_dtype, kv_dtype)
    peaks = Peaks(
        flops_s=device.peak(compute_dtype),
        bytes_s=device.bandwidth_bytes_s,
        dtype=compute_dtype,
        source=device.name,
    )
    act_bytes = 4 if rest_dtype == "float32" else 2
    return Replica(
        spec=spec,
        cost=cost,
        device=device,
        layout=layout,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        compute_dtype=compute_dtype,
        peaks=peaks,
        rates=part_rates(spec, device, eff, weight_dtype, rest_dtype),
        efficiency=eff,
        wires=communication(layout, spec, device, eff, act_bytes=act_bytes),
        num_kv_heads=num_kv_heads(spec),
        shared_bytes=cost.fixed_weight_bytes / layout.tp,
        head_bytes=cost.head_weight_bytes / layout.tp,
        expert_bytes=tuple(
            group.expert_bytes / layout.num_expert_devices for group in cost.experts
        ),
        resident_bytes=_resident_bytes(spec, cost, layout, (rest_dtype, head_dtype), calibration),
        linear_flops=cost.linear_flops_per_token / layout.tp,
        expert_flops=cost.expert_flops_per_token / layout.tp,
        step_overhead_s=step_overhead_s(spec, eff),
        head_flops=cost.head_flops / layout.tp,
        head_dtype=head_dtype,
        calibration=calibration,
    )


def with_measured_operators(machine: Replica, backend: str | None) -> Replica:
    """The replica with the operators that were measured under an engine, and the overheads next to
    them. Raises BadInput or CannotRun without tables of the device and engine."""
    if machine.calibration is not None:
        raise CannotRun(
            "measured operators are of data-sheet devices, and this one is calibrated",
            value=machine.device.name,
            fix="leave out --operators measured",
        )
    layout, weight_dtype = machine.layout, machine.weight_dtype
    experts_only = machine.cost.experts and serving_format(weight_dtype).experts_only
    rest_dtype = served_dtype(machine.spec, machine.device, weight_dtype)
    operators = StepOperators(
        tables=operator_tables(machine.device.name, backend),
        spec=machine.spec,
        tp=layout.tp,
        ep=layout.ep,
        num_attention=layout.num_attention,
        dense_dtype=rest_dtype if experts_only else weight_dtype,
        expert_dtype=weight_dtype,
        head_dtype=machine.head_dtype,
        kv_dtype=machine.kv_dtype,
    )
    eff = efficiency_of(machine.device, backend, measured=True)
    return msgspec.structs.replace(
        machine,
        operators=operators,
        efficiency=eff,
        step_overhead_s=step_overhead_s(machine.spec, eff),
    )


def served_dtype(spec: ModelSpec, device: Accelerator, weight_dtype: str | None = None) -> str:
    """The dtype of everything that is not quantised, and the default of the KV cache.

    This is the requested weight dtype if it is a float format, else the stored one. A float32
    checkpoint is served in 16 bits on devices without a float32 peak, as engines on accelerators
    do. On a calibrated device it is the dtype in which its engine computes.
    """
    if isinstance(device, MeasuredDevice):
        return device.calibration.dense_dtype
    if weight_dtype in WIDE_DTYPES:
        return weight_dtype
    stored = spec.stored_dtype
    return "bfloat16" if stored == "float32" and stored not in device.peak_flops else stored


def _default_weights(spec: ModelSpec, rest_dtype: str, calibration: Calibration | None) -> str:
    """The checkpoint's quantisation, else `rest_dtype`; Ridgeline's engine keeps the weights of a
    large bfloat16 checkpoint in bfloat16."""
    quantised = quantised_as(spec)
    if quantised is not None:
        return quantised
    large = num_params(spec) >= LARGE_PARAMS and spec.stored_dtype == "bfloat16"
    return "bfloat16" if calibration is not None and large else rest_dtype


def _default_kv(spec: ModelSpec, rest_dtype: str, calibration: Calibration | None) -> str:
    """`rest_dtype`; Ridgeline's engine keeps the KV cache of a large 16-bit model in its dtype."""
    narrow = spec.stored_dtype in ("bfloat16", "float16") and num_params(spec) >= LARGE_PARAMS
    return spec.stored_dtype if calibration is not None and narrow else rest_dtype


def _resident_bytes(
    spec: ModelSpec,
    cost: CostModel,
    layout: Layout,
    dtypes: tuple[str, str],
    calibration: Calibration | None,
) -> float:
    """Weight bytes in the memory of one device. `dtypes`: (unquantised weights, LM head)."""
    rest_dtype, head_dtype = dtypes
    shares_table = spec.tied_embeddings and (calibration is None or head_dtype == rest_dtype)
    # A bfloat16 table that the LM head does not share stays in bfloat16.
    table_dtype = "bfloat16" if spec.stored_dtype == "bfloat16" else rest_dtype
    tables = cost.head_weight_bytes
    tables += 0.0 if shares_table else table_bytes_in(spec, table_dtype)
    routed = sum(group.num_experts * group.expert_bytes for group in cost.experts)
    spread = layout.num_expert_devices
    return ((cost.fixed_weight_bytes + tables) / layout.tp + routed / spread) / layout.pp


def _efficiency(
    device: Accelerator, calibration: Calibration | None, backend: str | None
) -> Efficiency:
    """The published efficiency; for a calibrated device a record of which only errors and source
    are used."""
    if calibration is None:
        return efficiency_of(device, backend)
    return Efficiency(
        bandwidth=1.0,
        compute=1.0,
        expert_bandwidth=1.0,
        expert_compute=1.0,
        kv_bandwidth=1.0,
        latent_compute=1.0,
        prompt_compute=1.0,
        link=1.0,
        step_s=0.0,
        layer_s=0.0,
        run_s=0.0,
        collective_s=0.0,
        tpot_error=calibration.tpot_error,
        ttft_error=calibration.ttft_error,
        source=calibration.source,
        as_of=calibration.as_of,
    )


def _head_dtype(spec: ModelSpec, weight_dtype: str, calibration: Calibration) -> str:
    """Ridgeline's engine keeps the LM head in its dense dtype, except that of a quantised bfloat16
    checkpoint, which stays in bfloat16."""
    dense, stored = calibration.dense_dtype, spec.stored_dtype
    quantised = weight_dtype != dense
    return stored if quantised and (stored, dense) == ("bfloat16", "float32") else dense


def _check_calibrated(calibration: Calibration, layout: Layout, formats: tuple[str, ...]) -> None:
    if layout.num_devices > 1:
        raise CannotRun("a calibration covers one device only", value=str(layout), limit="tp1")
    for name in formats:
        calibration.linear(name)
