"""Choose a fleet for a model, a workload and an SLO: devices, layout, formats and replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import msgspec

from ridgeline.config.planning import PlanOptions
from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import Accelerator, find_accelerator
from ridgeline.hardware.links import with_links
from ridgeline.modelspec.checkpoints.planning import hub_name, load_planning_spec
from ridgeline.modelspec.cost.serving_formats import (
    SHORT_DTYPES,
    checkpoint_bytes,
    parse_kv_dtype,
    parse_weight_dtype,
    quantised_as,
)
from ridgeline.modelspec.model import ModelSpec
from ridgeline.plan.cost.api_prices import (
    STALE_DAYS,
    ApiUsage,
    age_days,
    check_fresh,
    load_prices,
    request_cost,
)
from ridgeline.plan.cost.ownership import break_even
from ridgeline.plan.cost.request_bill import RequestBill, request_bill
from ridgeline.plan.deploy.clusters import (
    DEFAULT_CLUSTER,
    ManifestOptions,
    require_pinned,
    resolve_target,
)
from ridgeline.plan.deploy.launch import LaunchPlan, launch_commands
from ridgeline.plan.deploy.manifests import Manifests, render_manifests
from ridgeline.plan.fleet.demand import Demand
from ridgeline.plan.fleet.disaggregate import DisaggregationVerdict, judge_disaggregation
from ridgeline.plan.fleet.infeasible import explain_infeasible
from ridgeline.plan.fleet.search import (
    HOURS_PER_MONTH,
    Candidate,
    SearchResult,
    SearchSpace,
    other_layouts,
    search,
)
from ridgeline.plan.step_time.adapters import AdapterLoad
from ridgeline.plan.step_time.memory import MemoryBudget, MemoryLimits, memory_budget
from ridgeline.plan.step_time.replica import Replica, build_replica
from ridgeline.plan.step_time.tier_loads import tier_loads
from ridgeline.records import Slo
from ridgeline.records.price import Commitment
from ridgeline.report.files import write_files
from ridgeline.report.numbers import rounded
from ridgeline.report.result import Result
from ridgeline.workflows.load.workload_lengths import is_text
from ridgeline.workflows.planning.device_catalogue import read_catalogue
from ridgeline.workflows.planning.plan_demand import (
    LiveTraffic,
    demand_of_options,
    live_demand,
    with_options,
)
from ridgeline.workflows.planning.plan_page import plan_page

MAX_FLEETS_SHOWN = 8


class FleetBill(msgspec.Struct, frozen=True, kw_only=True):
    """What the cheapest fleet costs, and what an API with a model of this architecture charges.

    Dollars. `terms`: commitment, provider and region of the device price. The API is the cheapest
    one known, without its discounts; its fields are None where no price of one is known.
    `fallback_per_month`: what it charges for the requests that the fleet leaves to it, which
    `per_month` does not contain.
    `break_even_rate`: requests per second of one replica above which it costs less than the API,
    None if it never does.
    """

    fleet: str
    terms: str
    per_hour: float
    per_month: float
    api: str | None = None
    api_per_month: float | None = None
    break_even_rate: float | None = None
    fallback_per_month: float = 0.0

    @property
    def sentence(self) -> str:
        """What to rent, what it costs a month, and what it would cost by API."""
        rent = (
            f"Rent {self.fleet}: ${self.per_hour:,.2f} an hour, ${self.per_month:,.0f} a month "
            f"({self.terms})."
        )
        if self.fallback_per_month:
            rent += f" The requests left to the API cost ${self.fallback_per_month:,.0f} more."
        if self.api is None or self.api_per_month is None:
            return f"{rent} No price of an API with a model of this architecture is known."
        total = self.per_month + self.fallback_per_month
        cheaper = "renting" if total < self.api_per_month else "the API"
        verdict = f"{cheaper} is cheaper at this load"
        if self.break_even_rate is not None:
            verdict += (
                f"; a replica costs less than the API from {rounded(self.break_even_rate)} "
                "requests/s on"
            )
        return (
            f"{rent} By API the same requests cost ${self.api_per_month:,.0f} a month "
            f"({self.api}); {verdict}."
        )


class PlanResult(Result, frozen=True, kw_only=True):
    """The fleets that meet the SLO, cheapest first, and how to start the first of them.

    `front`: the candidates that no other beats in both speed per user and throughput per device.
    `bill`: of the cheapest fleet, None if its price is unknown. `requests`: what a request costs
    on it.
    `memory_budget`: of one device of the cheapest fleet. `render_manifests`: Kubernetes and Ray
    Serve, if wanted. `traffic`: what the demand was taken from, if it was measured.
    """

    model: str
    bill: FleetBill | None
    demand: Demand
    slo: str
    num_candidates: int
    requests: RequestBill
    fleets: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    memory: MemoryBudget
    disaggregation: DisaggregationVerdict
    commands: dict[str, str]
    notes: tuple[str, ...]
    manifests: Manifests | None = None
    traffic: LiveTraffic | None = None

    def to_html(self) -> str:
        """The plan with the front as a chart."""
        return plan_page(self, Slo.parse(self.slo))

    def save_manifests(self, folder: str | Path) -> tuple[Path, ...]:
        """Write the manifests and return their paths. Raises CannotRun if there are none."""
        if self.manifests is None or not self.manifests.files:
            reasons = {} if self.manifests is None else self.manifests.left_out
            why = "; ".join(dict.fromkeys(reasons.values())) or "the plan was made without them"
            raise CannotRun("no manifest can be written for this fleet", value=why)
        return write_files(Path(folder), self.manifests.files)


def plan(options: PlanOptions) -> PlanResult:
    """Search for fleets. Raises UserError if none can meet the SLO, and says what limits it."""
    _check(options)
    spec = load_planning_spec(options.model)
    rows = read_catalogue(options.catalogue, options.calibration, options.device_prices)
    catalogue = with_links(rows, options.interconnect, options.network)
    traffic: LiveTraffic | None = None
    if options.from_traffic is None:
        demand = demand_of_options(options)
    else:
        demand, traffic = live_demand(options, spec)
    slo = Slo.parse(options.slo)
    demand = with_options(demand, options, spec)
    _check_context(options, demand, spec)
    space, stale = _with_fresh_prices(options, _space(options, catalogue), catalogue)
    search_result = search(spec, demand, slo, space, catalogue)
    if not search_result.fleets:
        raise explain_infeasible(spec, demand, slo, space, catalogue, search_result)
    result = _result(options, spec, demand, search_result, catalogue, stale)
    if traffic is None:
        return result
    notes = (traffic.note, *result.notes)
    return msgspec.structs.replace(result, traffic=traffic, notes=notes)


def _check(options: PlanOptions) -> None:
    """BadInput for an option that would have no effect."""
    wanted = manifest_options(options)
    if options.manifests is None and wanted != ManifestOptions():
        raise BadInput(
            "--cluster, --image, --ray-image and --node-label have no effect without --manifests",
            fix="name a folder: --manifests FOLDER",
        )
    for image in (wanted.image, wanted.ray_image):
        if image is not None:
            require_pinned(image)
    if wanted.node_label is not None and wanted.cluster != DEFAULT_CLUSTER:
        raise BadInput("--cluster cannot be combined with --node-label", value=wanted.cluster)


def manifest_options(options: PlanOptions) -> ManifestOptions:
    """The options about the cluster that the fleet runs on."""
    return ManifestOptions(
        cluster=options.cluster,
        image=options.image,
        ray_image=options.ray_image,
        node_label=options.node_label,
    )


def _cache_notes(demand: Demand) -> list[str]:
    """What stored answers and pinned prefixes change."""
    notes, answers, pinned = [], demand.answers, demand.pinned
    if demand.scored:
        notes.append(
            f"compressing documents reads {demand.scored:,} of their tokens for each request, next "
            f"to the {demand.isl:,} of its prompt"
        )
    if answers.computed_share < 1:
        notes.append(
            f"a response cache answers {1 - answers.computed_share:.0%} of the requests, in "
            f"milliseconds: the fleet computes {rounded(demand.computed_rate)} requests/s, whose "
            "TTFT and TPOT these are; prices are per token of all requests"
        )
    if answers.similar:
        notes.append(
            f"comparing questions embeds {answers.embedded_tokens} tokens for each computed request"
        )
    if pinned.tokens:
        notes.append(
            f"{pinned.count} pinned prefixes of {pinned.tokens:,} tokens stay in the KV cache of "
            "each replica: all requests find theirs, and share its blocks"
        )
    return notes


def _elsewhere_notes(demand: Demand, best: Candidate) -> list[str]:
    """What a managed API and a new version do of the load."""
    notes = []
    if demand.fallback:
        notes.append(
            f"a managed API answers {demand.fallback:.0%} of the requests, at its price: the "
            "fleet's figures are of the others, and --monthly-budget is the fleet's"
        )
    if canaries := demand.canary_replicas(best.rate):
        notes.append(
            f"{canaries} of the {best.num_replicas} replicas run a new version, which answers "
            f"copies of {demand.shadow:.0%} of the requests; the commands and manifests start the "
            "others"
        )
    return notes


def _batch_notes(demand: Demand, best: Candidate) -> list[str]:
    """What the batch requests add to the fleet."""
    if not demand.batch_rate:
        return []
    without = math.ceil(demand.computed_rate / best.rate)
    return [
        f"batch requests: {demand.batch_rate:g} per second fit next to the interactive ones over a "
        f"completion window; without them {without} of the {best.num_replicas} replicas serve the "
        "peak; latencies are those of full replicas (simulate a trace with --batch-share and "
        "--completion-window to see deadlines)"
    ]


def _check_context(options: PlanOptions, demand: Demand, spec: ModelSpec) -> None:
    """BadInput for a context length with which the printed commands could not serve the load."""
    max_model_len = options.max_model_len
    if max_model_len is not None and max_model_len < demand.longest:
        raise BadInput(
            "--max-model-len is shorter than the longest request",
            value=max_model_len,
            limit=f">= {demand.longest:,} tokens",
            fix="raise it, or leave it out",
        )
    if max_model_len is not None and max_model_len > spec.max_positions:
        raise BadInput(
            "--max-model-len is longer than the model's context",
            value=max_model_len,
            limit=f"<= {spec.max_positions:,} tokens",
        )


def _space(options: PlanOptions, catalogue: Mapping[str, Accelerator]) -> SearchSpace:
    names = _names(options.accelerator)
    if names is None:
        devices = tuple(
            device.name
            for device in catalogue.values()
            if device.peak_flops
            and (options.price_per_hour is not None or device.price(options.commitment) is not None)
        )
    else:
        devices = tuple(find_accelerator(name, dict(catalogue)).name for name in names)
    weights, kvs = _names(options.quantization), _names(options.kv_cache_dtype)
    return SearchSpace(
        devices=devices,
        weight_dtypes=None if weights is None else tuple(map(parse_weight_dtype, weights)),
        kv_dtypes=None if kvs is None else tuple(map(parse_kv_dtype, kvs)),
        max_devices_per_replica=options.max_devices,
        dollars_per_month=options.monthly_budget,
        dollars_per_device_hour=options.price_per_hour,
        commitment=options.commitment,
        adapters=_adapters(options),
    )


def _adapters(options: PlanOptions) -> AdapterLoad:
    return AdapterLoad(count=options.max_loras or 0, rank=options.max_lora_rank)


def _unpriced(device: Accelerator, commitment: Commitment) -> str:
    known = sorted({price.commitment for price in device.prices})
    has = f"; it has a price for {', '.join(known)}" if known else ""
    return f"the catalogue has no {commitment} price of {device.name}: its cost is unknown{has}"


def _with_fresh_prices(
    options: PlanOptions, space: SearchSpace, catalogue: Mapping[str, Accelerator]
) -> tuple[SearchSpace, list[str]]:
    """The space without devices whose price is stale, and notes about them.

    Raises BadInput if such a device was named, or no device is left.
    """
    if options.price_per_hour is not None:
        return space, []
    today = options.today or date.today()
    fresh, notes, refused = [], [], None
    for name in space.devices:
        price = catalogue[name].price(options.commitment)
        try:
            note = None
            if price is None:
                note = _unpriced(catalogue[name], options.commitment)
            else:
                note = check_fresh(name, price.as_of, today, accept_stale=options.accept_stale)
            fresh.append(name)
            notes += [note] if note else []
        except BadInput as error:
            refused = BadInput(
                error.what,
                value=error.value,
                limit=error.limit,
                fix="run `ridgeline catalogue --update --output prices.toml` and pass it as "
                "--device-prices; or give --price-per-hour or --accept-stale",
            )
            notes.append(f"{name} is left out: its price is stale ({error.value})")
    if refused is not None and (options.accelerator is not None or not fresh):
        raise refused
    return msgspec.structs.replace(space, devices=tuple(fresh)), notes


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise BadInput("the list is empty", value=text, fix="name one or more, with commas")
    return names


def _result(
    options: PlanOptions,
    spec: ModelSpec,
    demand: Demand,
    search_result: SearchResult,
    catalogue: Mapping[str, Accelerator],
    stale: list[str],
) -> PlanResult:
    best, slo = search_result.fleets[0], Slo.parse(options.slo)
    model = build_replica(
        spec,
        catalogue[best.device],
        best.layout,
        weight_dtype=best.weight_dtype,
        kv_dtype=best.kv_dtype,
    )
    adapters = _adapters(options)
    plain, model = model, adapters.on(model)
    limits = MemoryLimits(
        max_num_batched_tokens=best.max_num_batched_tokens, max_num_seqs=best.max_num_seqs
    )
    start = _start(options, spec, demand, best, catalogue)
    bill, hourly = _bill(options, demand, best, catalogue), best.dollars_per_hour
    if bill is not None and hourly is not None:
        hourly += bill.fallback_per_month / HOURS_PER_MONTH
    written = None
    if options.manifests is not None:
        purpose = f"{demand.rate:g} requests/s of {demand.isl} in, {demand.osl} out, under {slo}"
        where = resolve_target(start.device, manifest_options(options))
        written = render_manifests(start, where, checkpoint_bytes(spec), purpose)
    return PlanResult(
        model=options.model,
        bill=bill,
        demand=demand,
        slo=str(slo),
        num_candidates=search_result.num_candidates,
        requests=request_bill(best, demand.rate, slo, hourly),
        fleets=search_result.fleets[:MAX_FLEETS_SHOWN],
        front=search_result.front,
        memory=memory_budget(model, limits),
        disaggregation=judge_disaggregation(
            (model, *other_layouts(model, options.max_devices, adapters)), demand, slo, best
        ),
        commands=launch_commands(start),
        notes=(
            *_notes(options, best, model, catalogue),
            *_tier_notes(model, demand, best),
            *_batch_notes(demand, best),
            *_cache_notes(demand),
            *_elsewhere_notes(demand, best),
            *_adapter_notes(adapters, model.resident_bytes - plain.resident_bytes),
            *stale,
        ),
        manifests=written,
    )


def _bill(
    options: PlanOptions,
    demand: Demand,
    best: Candidate,
    catalogue: Mapping[str, Accelerator],
) -> FleetBill | None:
    hourly = best.dollars_per_hour
    if hourly is None:
        return None
    price = catalogue[best.device].price(options.commitment)
    terms = "your price" if options.price_per_hour is not None or price is None else price.terms
    weights = SHORT_DTYPES.get(best.weight_dtype, best.weight_dtype)
    bill = FleetBill(
        fleet=f"{best.num_replicas} x {best.device} {best.layout}, {weights} weights",
        terms=terms,
        per_hour=hourly,
        per_month=hourly * HOURS_PER_MONTH,
    )
    usage = ApiUsage(isl=demand.isl, osl=demand.osl, rate=demand.rate)
    today = options.today or date.today()
    hosts = [
        (request_cost(row, usage).total, row)
        for row in load_prices().values()
        if row.model == options.model
        and row.for_prompt(usage.isl) is not None
        and age_days(row.name, row.as_of, today) <= STALE_DAYS
    ]
    if not hosts and demand.fallback:
        raise CannotRun(
            "--fallback-share needs the price of an API with a model of this architecture, and "
            "none is known",
            value=options.model,
            fix="leave it out, and see `ridgeline cost` for the models with a price",
        )
    if not hosts:
        return bill
    per_request, host = min(hosts, key=lambda pair: pair[0])
    # A replica's rate is of the requests that it computes; the API is paid for all of them.
    of_all = msgspec.structs.replace(best, rate=best.rate / demand.answers.computed_share)
    return msgspec.structs.replace(
        bill,
        api=f"{host.name}, {host.as_of}",
        api_per_month=per_request * demand.rate * 3600 * HOURS_PER_MONTH,
        fallback_per_month=per_request * demand.fallback * demand.rate * 3600 * HOURS_PER_MONTH,
        break_even_rate=break_even(of_all, hourly, per_request).rate,
    )


def _start(
    options: PlanOptions,
    spec: ModelSpec,
    demand: Demand,
    best: Candidate,
    catalogue: Mapping[str, Accelerator],
) -> LaunchPlan:
    hub = hub_name(options.model)
    path = Path(options.model)
    longest = min(spec.max_positions, -(-demand.longest // 256) * 256)
    serving = best.num_replicas - demand.canary_replicas(best.rate)
    started = msgspec.structs.replace(
        best, num_replicas=serving, num_devices=serving * best.layout.num_devices
    )
    return LaunchPlan(
        candidate=started,
        device=catalogue[best.device],
        model=hub or str(path.parent if path.suffix == ".json" else path),
        stored=quantised_as(spec) or spec.stored_dtype,
        max_model_len=options.max_model_len or longest,
        on_hub=hub is not None,
    )


def _tier_notes(model: Replica, demand: Demand, best: Candidate) -> list[str]:
    """What the cheapest fleet loads from tiers of its KV cache, and what it computes instead."""
    loads = tier_loads(model, demand.tiers, demand.found, best.max_num_batched_tokens)
    notes = []
    if loads.tokens:
        notes.append(
            f"of a mean prompt {loads.tokens:,} tokens are loaded from tiers of the KV cache in "
            f"{rounded(1000 * (loads.copy_s + loads.wait_s))} ms; computing them would take "
            f"{rounded(1000 * loads.compute_s)} ms"
        )
    if loads.declined_tokens:
        notes.append(
            f"of a mean prompt {loads.declined_tokens:,} tokens are in tiers of the KV cache, but "
            "computing them is quicker than loading them"
        )
    return notes


def _adapter_notes(adapters: AdapterLoad, nbytes: float) -> list[str]:
    if not adapters.count:
        return []
    return [
        f"{adapters.count} LoRA adapters of rank {adapters.rank} take {rounded(nbytes / 1e9)} GB "
        "of each device, and a step reads all of them; the commands load none"
    ]


def _notes(
    options: PlanOptions,
    best: Candidate,
    model: Replica,
    catalogue: Mapping[str, Accelerator],
) -> tuple[str, ...]:
    """What a reader must know to judge the numbers."""
    notes = [
        f"shares of the peaks: {model.efficiency.source} ({model.efficiency.as_of})",
    ]
    price = catalogue[best.device].price(options.commitment)
    if options.price_per_hour is None and price is not None:
        notes.append(
            f"price: ${price.usd_per_hour:g} per {best.device} and hour, {price.terms}, "
            f"{price.source}, {price.as_of}"
        )
        saving = catalogue[best.device].saving(price)
        notes += [f"compared: {saving}"] if saving else []
    if options.workload is not None and is_text(options.workload):
        notes.append("the workload is text: lengths are estimated at four bytes per token")
    if model.weight_dtype not in (quantised_as(model.spec), model.spec.stored_dtype):
        notes.append(f"{model.weight_dtype} weights are lossy: measure their quality first")
    if model.kv_dtype != model.spec.stored_dtype:
        notes.append(f"a {model.kv_dtype} KV cache is lossy: measure its quality first")
    if not best.sure:
        notes.append(
            "the SLO is met at the prediction, but not at the far end of its 80 % interval"
        )
    notes.append("watts are the boards' design power: an upper bound, without the host")
    return tuple(notes)
