"""Compare the cost of a fleet of one's own with providers' prices for the same requests."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import msgspec

from ridgeline.config.planning import CostOptions
from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import Accelerator, find_accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.cost.api_prices import (
    STALE_DAYS,
    ApiPrice,
    ApiUsage,
    RequestCost,
    age_days,
    break_even_reads_per_hour,
    break_even_reuses,
    check_fresh,
    load_prices,
    request_cost,
)
from ridgeline.plan.cost.ownership import (
    BreakEven,
    OwnedDevice,
    SpotDevice,
    break_even,
)
from ridgeline.plan.cost.request_bill import RequestBill, request_bill
from ridgeline.plan.fleet.demand import Demand, demand_of
from ridgeline.plan.fleet.infeasible import explain_infeasible
from ridgeline.plan.fleet.search import HOURS_PER_MONTH, Candidate, SearchSpace, search
from ridgeline.records import Slo
from ridgeline.report.result import Result
from ridgeline.workflows.load.workload_lengths import workload_lengths
from ridgeline.workflows.planning.device_catalogue import read_catalogue
from ridgeline.workflows.planning.plan_demand import NUM_SAMPLES


class PaymentTerms(msgspec.Struct, frozen=True, kw_only=True):
    """One way to pay for the fleet. Amounts are dollars."""

    name: str
    per_device_hour: float
    per_month: float
    per_request: float
    as_of: str
    source: str


class ProviderOffer(msgspec.Struct, frozen=True, kw_only=True):
    """One provider's price for the same requests, in dollars, and where the fleet breaks even."""

    name: str
    provider: str
    per_request: RequestCost
    total_per_request: float
    per_month: float
    break_even: BreakEven
    reuses_to_pay: int | None
    reads_per_hour_to_pay: float | None
    as_of: str
    source: str


class CostResult(Result, frozen=True, kw_only=True):
    """The fleet's cost, every known way to pay for it, and the providers, cheapest first.

    `basis`: where the price of the fleet comes from. `requests`: its bill by request.
    """

    usage: ApiUsage
    fleet: Candidate
    dollars_per_hour: float
    dollars_per_month: float
    dollars_per_request: float
    kwh_per_million_output: float | None
    requests: RequestBill
    basis: str
    terms: tuple[PaymentTerms, ...]
    offers: tuple[ProviderOffer, ...]
    notes: tuple[str, ...]


def cost(options: CostOptions) -> CostResult:
    """Size the cheapest fleet that meets the SLO and compare its cost. Raises UserError."""
    catalogue = read_catalogue(options.catalogue, options.calibration, options.device_prices)
    device = find_accelerator(options.accelerator, catalogue)
    today = options.today or date.today()
    demand = _demand(options)
    device_price, basis, notes = _device_price(options, device, today)
    fleet = _fleet(options, demand, device_price, catalogue)
    usage = ApiUsage(
        isl=demand.isl,
        osl=demand.osl,
        rate=options.request_rate,
        prefix=min(options.prefix_len, demand.isl),
        hit_rate=options.hit_rate,
        num_prefixes=options.num_prefixes,
        batch=options.batch_api,
        long_lived=options.long_lived,
    )
    hourly = device_price * fleet.num_devices
    offers, stale = _offers(options, usage, fleet, hourly, today)
    requests = request_bill(fleet, usage.rate, Slo.parse(options.slo), hourly)
    return CostResult(
        usage=usage,
        fleet=fleet,
        dollars_per_hour=hourly,
        dollars_per_month=hourly * HOURS_PER_MONTH,
        dollars_per_request=hourly / 3600 / usage.rate,
        kwh_per_million_output=requests.kwh_per_million_output,
        requests=requests,
        basis=basis,
        terms=_payment_terms(options, device, fleet, today),
        offers=offers,
        notes=(*notes, *stale),
    )


def owned_device(options: CostOptions) -> OwnedDevice | None:
    """What an owned device costs, if its price is given. Raises BadInput."""
    if options.owned_dollars is None:
        return None
    if options.watts is None:
        raise BadInput("--owned-dollars needs --watts", value=options.owned_dollars)
    return OwnedDevice(
        dollars=options.owned_dollars,
        years=options.owned_years,
        watts=options.watts,
        dollars_per_kwh=options.dollars_per_kwh,
        pue=options.pue,
    )


def spot_device(options: CostOptions) -> SpotDevice | None:
    """What a spot device costs, if its price is given."""
    if options.spot_price is None:
        return None
    return SpotDevice(
        price=options.spot_price,
        interruptions_per_hour=options.spot_interruptions,
        lost_s=options.spot_lost_s,
    )


def _demand(options: CostOptions) -> Demand:
    lengths = [(options.input_len, options.output_len)]
    if options.workload is not None:
        lengths = workload_lengths(options.workload, NUM_SAMPLES)
    mean = sum(prompt for prompt, _ in lengths) / len(lengths)
    if options.prefix_len > mean:
        raise BadInput(
            "--prefix-len is longer than the mean prompt",
            value=options.prefix_len,
            limit=f"{mean:,.0f} tokens",
            fix="name the part of a prompt that requests share",
        )
    cached_share = options.prefix_len * options.hit_rate / mean
    return demand_of(lengths, options.request_rate, cached_share)


def _device_price(
    options: CostOptions, device: Accelerator, today: date
) -> tuple[float, str, list[str]]:
    """Dollars per device and hour, where the price comes from, and warnings."""
    owned = owned_device(options)
    if owned is not None:
        return owned.dollars_per_hour, f"owned for {owned.years:g} years", []
    if options.price_per_hour is not None:
        return options.price_per_hour, "your price", []
    price = device.price(options.commitment)
    if price is None:
        known = sorted({price.commitment for price in device.prices})
        raise BadInput(
            f"the catalogue has no {options.commitment} price for this device",
            value=device.name,
            limit=", ".join(known) or "no price at all",
            fix="give --price-per-hour or --owned-dollars"
            + (f", or --commitment {known[0]}" if known else ""),
        )
    stale = check_fresh(device.name, price.as_of, today, accept_stale=options.accept_stale)
    basis = f"{price.terms}, {price.source}, {price.as_of}"
    warnings = [device.saving(price), stale]
    return price.usd_per_hour, basis, [text for text in warnings if text]


def _payment_terms(
    options: CostOptions, device: Accelerator, fleet: Candidate, today: date
) -> tuple[PaymentTerms, ...]:
    """Every known way to pay, cheapest first; stale prices only if they are accepted."""
    month = today.isoformat()[:7]
    rows = [
        (price.terms, price.usd_per_hour, price.as_of, price.source)
        for price in device.prices
        if options.accept_stale or age_days(device.name, price.as_of, today) <= STALE_DAYS
    ]
    if options.price_per_hour is not None:
        rows.append(("your price", options.price_per_hour, month, "you"))
    spot, owned = spot_device(options), owned_device(options)
    if spot is not None:
        name = f"spot, {spot.interruptions_per_hour:g} interruptions an hour"
        rows.append((name, spot.dollars_per_hour, month, "you"))
    if owned is not None:
        name = f"owned for {owned.years:g} years, with power"
        rows.append((name, owned.dollars_per_hour, month, "you"))
    terms = [
        PaymentTerms(
            name=name,
            per_device_hour=dollars,
            per_month=dollars * fleet.num_devices * HOURS_PER_MONTH,
            per_request=dollars * fleet.num_devices / 3600 / options.request_rate,
            as_of=as_of,
            source=source,
        )
        for name, dollars, as_of, source in rows
    ]
    return tuple(sorted(terms, key=lambda row: row.per_device_hour))


def _fleet(
    options: CostOptions, demand: Demand, device_price: float, catalogue: dict[str, Accelerator]
) -> Candidate:
    spec, slo = load_planning_spec(options.model), Slo.parse(options.slo)
    space = SearchSpace(
        devices=(find_accelerator(options.accelerator, catalogue).name,),
        dollars_per_device_hour=device_price,
    )
    search_result = search(spec, demand, slo, space, catalogue)
    if not search_result.fleets:
        raise explain_infeasible(spec, demand, slo, space, catalogue, search_result)
    return search_result.fleets[0]


def _offers(
    options: CostOptions, usage: ApiUsage, fleet: Candidate, hourly: float, today: date
) -> tuple[tuple[ProviderOffer, ...], list[str]]:
    """The providers, cheapest first, and warnings about their prices."""
    offers, notes = [], []
    for price in _provider_prices(options.prices).values():
        if price.model not in ("", options.model):
            continue
        tier = price.for_prompt(usage.isl)
        if tier is None:
            notes.append(
                f"{price.name} is left out: its rates for prompts of more than "
                f"{price.max_prompt:,} tokens are not known"
            )
            continue
        stale = check_fresh(price.name, price.as_of, today, accept_stale=options.accept_stale)
        notes += [stale] if stale else []
        offers.append(_offer(tier, usage, fleet, hourly))
    return tuple(sorted(offers, key=lambda offer: offer.total_per_request)), notes


def _provider_prices(path: Path | None) -> dict[str, ApiPrice]:
    if path is None:
        return load_prices()
    try:
        return load_prices(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("cannot read the prices", value=str(path), fix=str(error)) from None


def _offer(price: ApiPrice, usage: ApiUsage, fleet: Candidate, hourly: float) -> ProviderOffer:
    request = request_cost(price, usage)
    cached = usage.prefix > 0 and request.caches
    return ProviderOffer(
        name=price.name,
        provider=price.provider,
        per_request=request,
        total_per_request=request.total,
        per_month=request.total * usage.rate * 3600 * HOURS_PER_MONTH,
        break_even=break_even(fleet, hourly, request.total),
        reuses_to_pay=break_even_reuses(price, long_lived=usage.long_lived) if cached else None,
        reads_per_hour_to_pay=break_even_reads_per_hour(price)
        if cached and price.storage_per_hour
        else None,
        as_of=price.as_of,
        source=price.source,
    )
