"""`ridgeline plan`: from a model, a workload and a promise to a fleet, its price and commands."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import Accelerator, find_accelerator
from ridgeline.modelspec.cost.serving_formats import kv_dtype, weight_dtype
from ridgeline.plan.cost.api_prices import check_fresh
from ridgeline.plan.deploy.clusters import DEFAULT_CLUSTER, Asked, pinned, place
from ridgeline.plan.deploy.launch import Start, commands
from ridgeline.plan.deploy.manifests import Written, manifests
from ridgeline.plan.fleet.demand import Demand, demand_of
from ridgeline.plan.fleet.disaggregate import Verdict, verdict
from ridgeline.plan.fleet.infeasible import impossible
from ridgeline.plan.fleet.pareto_plot import draw_front
from ridgeline.plan.fleet.search import Candidate, Found, Space, quoted_price, search
from ridgeline.plan.model.outline import Outline, hub_name, load_outline
from ridgeline.plan.model.weight_bytes import checkpoint_bytes
from ridgeline.plan.step_time.memory import Memory, MemoryAsked, memory
from ridgeline.plan.step_time.replica import Replica, replica
from ridgeline.records import Slo
from ridgeline.report.files import write_file, write_files
from ridgeline.report.json_line import json_line
from ridgeline.workflows.bench.workload_lengths import ISL, OSL, is_text, workload_lengths
from ridgeline.workflows.planning.predict import read_catalogue

SHOWN = 8
SAMPLED = 1000


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command's flags; lists are comma-separated names."""

    model: str
    workload: str | None
    isl: int | None
    osl: int | None
    rate: float
    cached: float
    slo: str
    devices: str | None
    weight_dtypes: str | None
    kv_dtypes: str | None
    budget: float | None
    price_per_hour: float | None
    accept_stale: bool
    today: date
    max_devices: int
    max_model_len: int | None
    catalogue: Path | None
    calibration: Path | None
    manifests: Path | None
    place: Asked
    html: Path | None
    seed: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is told."""

    model: str
    demand: Demand
    slo: str
    num_candidates: int
    fleets: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    memory: Memory
    disaggregation: Verdict
    commands: dict[str, str]
    notes: tuple[str, ...]


def command(options: PlanOptions, as_json: bool) -> int:
    """Plan and print; the exit code. Raises UserError where no fleet can keep the promise."""
    _check(options)
    outline, catalogue = (
        load_outline(options.model),
        read_catalogue(options.catalogue, options.calibration),
    )
    demand, slo = _demand(options), Slo.parse(options.slo)
    _check_context(options, demand, outline)
    space = _space(options, catalogue)
    space, stale = _fresh(options, space, catalogue)
    found = search(outline, demand, slo, space, catalogue)
    if not found.fleets:
        raise impossible(outline, demand, slo, space, catalogue, found)
    plan = _plan(options, outline, demand, slo, found, catalogue)
    plan = msgspec.structs.replace(plan, notes=(*plan.notes, *stale))
    if options.html is not None:
        from ridgeline.cli.render.plan_html import plan_page

        write_file(options.html, [plan_page(plan, slo).encode()])
    if as_json:
        print(json_line(plan))
    else:
        _print(plan, slo, Console(highlight=False))
    if options.manifests is not None:
        start = _start(options, outline, demand, found.fleets[0], catalogue)
        written = _written(options.place, outline, start, plan)
        _write(options.manifests, written, Console(highlight=False, stderr=True))
    return 0


def _check(options: PlanOptions) -> None:
    """BadInput for a flag that would have no effect."""
    if options.manifests is None and options.place != Asked():
        raise BadInput(
            "--cluster, --image, --ray-image and --node-label have no effect without --manifests",
            fix="name a folder: --manifests FOLDER",
        )
    for image in (options.place.image, options.place.ray_image):
        if image is not None:
            pinned(image)
    if options.place.node_label is not None and options.place.cluster != DEFAULT_CLUSTER:
        raise BadInput("--cluster has no effect beside --node-label", value=options.place.cluster)


def _demand(options: PlanOptions) -> Demand:
    if options.workload is not None:
        if options.isl is not None or options.osl is not None:
            raise BadInput(
                "--isl and --osl have no effect beside --workload", value=options.workload
            )
        lengths = workload_lengths(options.workload, SAMPLED, options.seed)
    else:
        isl = ISL if options.isl is None else options.isl
        lengths = [(isl, OSL if options.osl is None else options.osl)]
    return demand_of(lengths, options.rate, options.cached)


def _check_context(options: PlanOptions, demand: Demand, outline: Outline) -> None:
    """BadInput for a --max-model-len with which the commands that are printed would refuse the
    load, or not start."""
    asked = options.max_model_len
    if asked is not None and asked < demand.longest:
        raise BadInput(
            "--max-model-len is shorter than the longest request",
            value=asked,
            limit=f">= {demand.longest:,} tokens",
            fix="allow more, or leave it out",
        )
    if asked is not None and asked > outline.max_positions:
        raise BadInput(
            "--max-model-len is longer than the model's context",
            value=asked,
            limit=f"<= {outline.max_positions:,} tokens",
        )


def _space(options: PlanOptions, catalogue: Mapping[str, Accelerator]) -> Space:
    names = _names(options.devices)
    if names is None:
        chosen = tuple(d.name for d in catalogue.values() if d.prices and d.peak_flops)
    else:
        chosen = tuple(find_accelerator(name, dict(catalogue)).name for name in names)
    weights, kvs = _names(options.weight_dtypes), _names(options.kv_dtypes)
    return Space(
        devices=chosen,
        weight_dtypes=None if weights is None else tuple(map(weight_dtype, weights)),
        kv_dtypes=None if kvs is None else tuple(map(kv_dtype, kvs)),
        max_devices_per_replica=options.max_devices,
        dollars_per_month=options.budget,
        dollars_per_device_hour=options.price_per_hour,
    )


def _fresh(
    options: PlanOptions, space: Space, catalogue: Mapping[str, Accelerator]
) -> tuple[Space, list[str]]:
    """The space without devices whose price is too old to be used silently, and what to say of it.

    BadInput where a device was asked for by name, or none is left.
    """
    if options.price_per_hour is not None:
        return space, []
    kept, told, last = [], [], None
    for name in space.devices:
        price = quoted_price(catalogue[name])
        try:
            note = None
            if price is not None:
                note = check_fresh(
                    name, price.as_of, options.today, accept_stale=options.accept_stale
                )
            kept.append(name)
            told += [note] if note else []
        except BadInput as error:
            last = BadInput(
                error.what,
                value=error.value,
                limit=error.limit,
                fix="look it up again: --price-per-hour, --catalogue; or say --accept-stale",
            )
            told.append(f"{name} is left out: its price is stale ({error.value})")
    if last is not None and (options.devices is not None or not kept):
        raise last
    return msgspec.structs.replace(space, devices=tuple(kept)), told


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if not found:
        raise BadInput("the list is empty", value=text, fix="name one or more, with commas")
    return found


def _context(demand: Demand, outline: Outline) -> int:
    """The longest request, rounded up to 256 tokens, within the model's own limit."""
    return min(outline.max_positions, -(-demand.longest // 256) * 256)


def _plan(
    options: PlanOptions,
    outline: Outline,
    demand: Demand,
    slo: Slo,
    found: Found,
    catalogue: Mapping[str, Accelerator],
) -> Plan:
    best = found.fleets[0]
    machine = _machine(outline, best, catalogue)
    asked = MemoryAsked(max_num_batched_tokens=best.max_num_batched_tokens, max_num_seqs=best.seats)
    return Plan(
        model=options.model,
        demand=demand,
        slo=str(slo),
        num_candidates=found.num_candidates,
        fleets=found.fleets[:SHOWN],
        front=found.front,
        memory=memory(machine, asked),
        disaggregation=verdict(machine, demand, slo, best),
        commands=commands(_start(options, outline, demand, best, catalogue)),
        notes=_notes(options, best, machine, catalogue),
    )


def _machine(outline: Outline, each: Candidate, catalogue: Mapping[str, Accelerator]) -> Replica:
    return replica(
        outline,
        catalogue[each.device],
        each.layout,
        weight_dtype=each.weight_dtype,
        kv_dtype=each.kv_dtype,
    )


def _notes(
    options: PlanOptions,
    best: Candidate,
    machine: Replica,
    catalogue: Mapping[str, Accelerator],
) -> tuple[str, ...]:
    """What the reader must know beside the numbers."""
    told = [f"shares of the peaks: {machine.efficiency.source} ({machine.efficiency.as_of})"]
    price = quoted_price(catalogue[best.device])
    if options.price_per_hour is None and price is not None:
        told.append(
            f"price: ${price.usd_per_hour:g} per {best.device} and hour, {price.terms}, "
            f"{price.source}, {price.as_of}"
        )
    if options.workload is not None and is_text(options.workload):
        told.append("the workload is text: its lengths are estimated at four bytes per token")
    if machine.weight_dtype not in (machine.outline.packed, machine.outline.stored_dtype):
        told.append(f"{machine.weight_dtype} weights are lossy: measure their quality first")
    if machine.kv_dtype != machine.outline.stored_dtype:
        told.append(f"a {machine.kv_dtype} KV cache is lossy: measure its quality first")
    if not best.sure:
        told.append("the promise holds at the prediction, not at the far end of its 80 % interval")
    told.append("watts are the boards' design power: an upper bound without the host")
    return tuple(told)


def _start(
    options: PlanOptions,
    outline: Outline,
    demand: Demand,
    best: Candidate,
    catalogue: Mapping[str, Accelerator],
) -> Start:
    on_hub = hub_name(options.model)
    here = Path(options.model)
    return Start(
        each=best,
        device=catalogue[best.device],
        model=on_hub or str(here.parent if here.suffix == ".json" else here),
        stored=outline.packed or outline.stored_dtype,
        max_model_len=options.max_model_len or _context(demand, outline),
        on_hub=on_hub is not None,
    )


def _written(asked: Asked, outline: Outline, start: Start, plan: Plan) -> Written:
    """The winner's manifests. Raises what `place` raises."""
    demand = plan.demand
    promise = f"{demand.rate:g} requests/s of {demand.isl} in, {demand.osl} out, under {plan.slo}"
    return manifests(start, place(start.device, asked), checkpoint_bytes(outline), promise)


def _write(folder: Path, written: Written, out: Console) -> None:
    """CannotRun where nothing can be written."""
    if not written.files:
        why = "; ".join(dict.fromkeys(written.left_out.values()))
        raise CannotRun("no manifest can be written of this fleet", value=why)
    for path in write_files(folder, written.files):
        out.print(f"written: {path}", style="dim", markup=False, soft_wrap=True)
    for name, why in written.left_out.items():
        out.print(f"not written: {name}: {why}", style="yellow", markup=False, soft_wrap=True)


def _print(plan: Plan, slo: Slo, out: Console) -> None:
    demand = plan.demand
    out.print(
        f"{plan.model}: {demand.rate:g} requests/s of {demand.isl} in (95 %: {demand.isl_p95}), "
        f"{demand.osl} out, under {slo}; {plan.num_candidates:,} candidates"
    )
    out.print(fleet_table(plan.fleets))
    out.print(_memory_table(plan))
    split = plan.disaggregation
    out.print(f"disaggregate prefill and decode: {'yes' if split.yes else 'no'}: {split.why}")
    picture = draw_front(plan.front, slo.tpot_s)
    if picture:
        out.print()
        out.print(picture, markup=False)
    out.print()
    for name, text in plan.commands.items():
        lines = text.replace("\n", "\n  ")
        out.print(f"{name}:\n  {lines}", markup=False, soft_wrap=True)
    out.print()
    for note in plan.notes:
        out.print(f"- {note}", markup=False, soft_wrap=True, style="dim")


def fleet_table(fleets: tuple[Candidate, ...]) -> Table:
    """One row per replica kind, cheapest first: ms, dollars per hour and per 1M tokens."""
    caption = "ms, with 80 % intervals; dollars per hour, per 1M tokens in and out"
    table = Table(
        box=None, pad_edge=False, padding=(0, 1, 0, 0), caption=caption, caption_justify="left"
    )
    for name in ("fleet", "weights/KV"):
        table.add_column(name, no_wrap=True)
    for name in ("seqs", "TTFT", "80 %", "TPOT", "80 %", "$/h", "$in", "$out", "kW"):
        table.add_column(name, justify="right", overflow="fold")
    for each in fleets:
        table.add_row(
            f"{each.num_replicas} x {each.device} {each.layout}",
            f"{_short(each.weight_dtype)}/{_short(each.kv_dtype)}",
            str(each.batch),
            f"{each.ttft_s * 1000:.0f}",
            _range(each.ttft_interval_s),
            f"{each.tpot_s * 1000:.3g}",
            _range(each.tpot_interval_s),
            _dollars(each.dollars_per_hour),
            _dollars(each.input_dollars_per_mtok),
            _dollars(each.output_dollars_per_mtok),
            "" if each.watts is None else f"{each.watts / 1000:.1f}",
        )
    return table


def _range(interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{low * 1000:.0f}-{high * 1000:.0f}"


def _short(dtype: str) -> str:
    return {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3": "fp8"}.get(dtype, dtype)


def _dollars(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}" if value < 1 else f"{value:.3g}"


def _memory_table(plan: Plan) -> Table:
    best, found = plan.fleets[0], plan.memory
    title = f"memory of one {best.device}, {best.layout}, {best.weight_dtype}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    table.min_width = len(title)
    for name, nbytes in found.rows():
        table.add_row(name, f"{nbytes / 1e9:.2f} GB")
    copies = "" if found.kv_copies == 1 else f", each number held {found.kv_copies:g} times"
    table.add_row("KV per token", f"{found.kv_bytes_per_token:,.0f} B{copies}")
    table.add_row("KV of the replica", f"{found.kv_tokens:,} tokens")
    return table
