"""What a model needs of each device: how many hold it, with how many sequences of which length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from ridgeline.config.planning import CapacityOptions
from ridgeline.errors import BadInput, UserError
from ridgeline.hardware.catalogue import Accelerator, find_accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.serving_formats import parse_kv_dtype, parse_weight_dtype
from ridgeline.modelspec.model import ModelSpec
from ridgeline.plan.step_time.memory import MemoryLimits, memory_budget
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.replica import Replica, build_replica
from ridgeline.report.result import Result
from ridgeline.workflows.planning.device_catalogue import read_catalogue

CONTEXTS = (2048, 8192, 32_768, 131_072)
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)


class DeviceCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The least number of one device, split by tensor parallelism, that holds the model.

    `num_seqs`: sequences of each context length that fit at once, by length; `longest`: tokens of
    one sequence alone. Bytes are of the whole replica. `dollars_per_hour` is None without a price.
    """

    device: str
    num_devices: int
    weight_dtype: str
    kv_dtype: str
    weight_bytes: float
    kv_bytes: float
    num_seqs: dict[int, int]
    longest: int
    dollars_per_hour: float | None


class CapacityResult(Result, frozen=True, kw_only=True):
    """The devices that hold the model, least memory first, and why others do not."""

    model: str
    contexts: tuple[int, ...]
    rows: tuple[DeviceCapacity, ...]
    too_small: dict[str, str]

    @property
    def cheapest(self) -> DeviceCapacity | None:
        """The row with the lowest price, if any has one."""
        priced = [row for row in self.rows if row.dollars_per_hour is not None]
        return min(priced, key=lambda row: row.dollars_per_hour or 0.0, default=None)


def capacity(options: CapacityOptions) -> CapacityResult:
    """For each device the smallest replica that holds the model. Raises UserError."""
    spec = load_planning_spec(options.model)
    catalogue = read_catalogue(options.catalogue, prices=options.device_prices)
    contexts = _contexts(options, spec)
    rows: list[DeviceCapacity] = []
    too_small: dict[str, str] = {}
    for device in _devices(options, catalogue):
        row, why = _smallest(options, spec, device, contexts)
        if row is not None:
            rows.append(row)
        else:
            too_small[device.name] = why
    total = {row.device: row.num_devices * catalogue[row.device].memory_bytes for row in rows}
    rows.sort(key=lambda row: (total[row.device], row.dollars_per_hour or float("inf")))
    return CapacityResult(
        model=options.model, contexts=contexts, rows=tuple(rows), too_small=too_small
    )


def _devices(options: CapacityOptions, catalogue: Mapping[str, Accelerator]) -> list[Accelerator]:
    if options.accelerator is None:
        return [device for device in catalogue.values() if device.peak_flops]
    names = [name.strip() for name in options.accelerator.split(",") if name.strip()]
    return [find_accelerator(name, dict(catalogue)) for name in names]


def _contexts(options: CapacityOptions, spec: ModelSpec) -> tuple[int, ...]:
    if options.context is None:
        known = [length for length in CONTEXTS if length < spec.max_positions]
        return (*known, spec.max_positions)
    try:
        lengths = sorted({int(text) for text in options.context.split(",")})
    except ValueError:
        raise BadInput(
            "--context needs lengths in tokens", value=options.context, limit="2048,32768"
        ) from None
    for length in lengths:
        if not 1 <= length <= spec.max_positions:
            raise BadInput(
                "--context is out of range",
                value=length,
                limit=f"1 to {spec.max_positions:,} tokens, the model's own limit",
            )
    return tuple(lengths)


def _smallest(
    options: CapacityOptions, spec: ModelSpec, device: Accelerator, contexts: Sequence[int]
) -> tuple[DeviceCapacity | None, str]:
    """The first size that holds one sequence of the shortest context, or why there is none."""
    why: list[str] = []
    for tp in TENSOR_PARALLEL_SIZES:
        if tp > options.max_devices:
            break
        try:
            replica = build_replica(
                spec,
                device,
                Layout(tp=tp),
                weight_dtype=_parsed(options.quantization, parse_weight_dtype),
                kv_dtype=_parsed(options.kv_cache_dtype, parse_kv_dtype),
            )
        except UserError as error:
            why.append(str(error))
            break
        row = _measure(options, replica, contexts)
        if row.num_seqs[contexts[0]] > 0:
            return row, ""
        why = [f"{tp} x {device.name}: no memory left for one sequence of {contexts[0]:,} tokens"]
    return None, "; ".join(why)


def _parsed(text: str | None, parse: Callable[[str], str]) -> str | None:
    return None if text is None else parse(text)


def _measure(options: CapacityOptions, replica: Replica, contexts: Sequence[int]) -> DeviceCapacity:
    limits = MemoryLimits(utilization=options.memory_utilization)
    budget = memory_budget(replica, limits)
    tokens, kv_tokens = budget.kv_tokens, replica.cost.kv_tokens
    price = replica.device.price(options.commitment)
    num_devices = replica.layout.num_devices
    return DeviceCapacity(
        device=replica.device.name,
        num_devices=num_devices,
        weight_dtype=replica.weight_dtype,
        kv_dtype=replica.kv_dtype,
        weight_bytes=budget.weight_bytes * num_devices,
        kv_bytes=budget.kv_bytes * num_devices,
        num_seqs={context: int(tokens // kv_tokens(context)) for context in contexts},
        longest=_longest(replica, tokens),
        dollars_per_hour=None if price is None else price.usd_per_hour * num_devices,
    )


def _longest(replica: Replica, tokens: int) -> int:
    """The longest context of one sequence that fits `tokens` of KV cache."""
    low, high = 0, replica.spec.max_positions
    while low < high:
        middle = (low + high + 1) // 2
        fits = replica.cost.kv_tokens(middle) <= tokens
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
