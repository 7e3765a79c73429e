"""Compare the cost of a fleet of one's own with providers' prices for the same requests."""

from __future__ import annotations

from datetime import date
from math import inf
from pathlib import Path

import msgspec

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
    kwh_per_million,
)
from ridgeline.plan.fleet.demand import Demand, demand_of
from ridgeline.plan.fleet.infeasible import explain_infeasible
from ridgeline.plan.fleet.search import Candidate, SearchSpace, quoted_price, search
from ridgeline.records import Slo
from ridgeline.report.result import Result
from ridgeline.workflows.load.workload_lengths import workload_lengths
from ridgeline.workflows.planning.device_catalogue import read_catalogue
from ridgeline.workflows.planning.plan import NUM_SAMPLES, PLANNING_SLO

HOURS_PER_MONTH = 730


class CostRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet on one kind of device, its load, and how it is paid for."""

    model: str
    device: str
    workload: str | None = None
    isl: int = 1024
    osl: int = 256
    rate: float = 1.0
    slo: str = PLANNING_SLO
    prefix: int = 0
    hit_rate: float = 0.0
    num_prefixes: int = 1
    batch: bool = False
    long_lived: bool = False
    price_per_hour: float | None = None
    owned: OwnedDevice | None = None
    spot: SpotDevice | None = None
    prices: Path | None = None
    accept_stale: bool = False
    catalogue: Path | None = None
    calibration: Path | None = None
    today: date | None = None

    def __post_init__(self) -> None:
        for field, lowest in {"isl": 1, "osl": 1, "prefix": 0, "num_prefixes": 1}.items():
            if (value := getattr(self, field)) < lowest:
                flag = "--" + field.removeprefix("num_")
                raise BadInput(f"{flag} is too small", value=value, limit=f">= {lowest}")
        if not 0 <= self.hit_rate <= 1:
            raise BadInput("--hit-rate must be a share", value=self.hit_rate, limit="0 to 1")
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < inf:
            raise BadInput(
                "--price-per-hour is out of range", value=self.price_per_hour, limit=">= 0 $/hour"
            )


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

    `basis`: where the price of the fleet comes from.
    """

    usage: ApiUsage
    fleet: Candidate
    dollars_per_hour: float
    dollars_per_month: float
    dollars_per_request: float
    kwh_per_million_output: float | None
    basis: str
    terms: tuple[PaymentTerms, ...]
    offers: tuple[ProviderOffer, ...]
    notes: tuple[str, ...]


def cost(options: CostRequest) -> CostResult:
    """Size the cheapest fleet that meets the SLO and compare its cost. Raises UserError."""
    catalogue = read_catalogue(options.catalogue, options.calibration)
    device = find_accelerator(options.device, catalogue)
    today = options.today or date.today()
    demand = _demand(options)
    device_price, basis, notes = _device_price(options, device, today)
    fleet = _fleet(options, demand, device_price, catalogue)
    usage = ApiUsage(
        isl=demand.isl,
        osl=demand.osl,
        rate=options.rate,
        prefix=min(options.prefix, demand.isl),
        hit_rate=options.hit_rate,
        num_prefixes=options.num_prefixes,
        batch=options.batch,
        long_lived=options.long_lived,
    )
    hourly = device_price * fleet.num_devices
    offers, stale = _offers(options, usage, fleet, hourly, today)
    joules = fleet.joules_per_output_token
    return CostResult(
        usage=usage,
        fleet=fleet,
        dollars_per_hour=hourly,
        dollars_per_month=hourly * HOURS_PER_MONTH,
        dollars_per_request=hourly / 3600 / usage.rate,
        kwh_per_million_output=None if joules is None else kwh_per_million(joules),
        basis=basis,
        terms=_payment_terms(options, device, fleet, today),
        offers=offers,
        notes=(*notes, *stale),
    )


def _demand(options: CostRequest) -> Demand:
    lengths = [(options.isl, options.osl)]
    if options.workload is not None:
        lengths = workload_lengths(options.workload, NUM_SAMPLES)
    mean = sum(prompt for prompt, _ in lengths) / len(lengths)
    cached_share = min(options.prefix, mean) * options.hit_rate / mean
    return demand_of(lengths, options.rate, cached_share)


def _device_price(
    options: CostRequest, device: Accelerator, today: date
) -> tuple[float, str, list[str]]:
    """Dollars per device and hour, where the price comes from, and warnings."""
    if options.owned is not None:
        return options.owned.dollars_per_hour, f"owned for {options.owned.years:g} years", []
    if options.price_per_hour is not None:
        return options.price_per_hour, "your price", []
    price = quoted_price(device)
    if price is None:
        raise BadInput(
            "the catalogue has no price for this device",
            value=device.name,
            fix="give --price-per-hour, or --owned-dollars",
        )
    stale = check_fresh(device.name, price.as_of, today, accept_stale=options.accept_stale)
    basis = f"{price.terms}, {price.source}, {price.as_of}"
    return price.usd_per_hour, basis, [stale] if stale else []


def _payment_terms(
    options: CostRequest, device: Accelerator, fleet: Candidate, today: date
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
    if options.spot is not None:
        name = f"spot, {options.spot.interruptions_per_hour:g} interruptions an hour"
        rows.append((name, options.spot.dollars_per_hour, month, "you"))
    if options.owned is not None:
        name = f"owned for {options.owned.years:g} years, with power"
        rows.append((name, options.owned.dollars_per_hour, month, "you"))
    terms = [
        PaymentTerms(
            name=name,
            per_device_hour=dollars,
            per_month=dollars * fleet.num_devices * HOURS_PER_MONTH,
            per_request=dollars * fleet.num_devices / 3600 / options.rate,
            as_of=as_of,
            source=source,
        )
        for name, dollars, as_of, source in rows
    ]
    return tuple(sorted(terms, key=lambda each: each.per_device_hour))


def _fleet(
    options: CostRequest, demand: Demand, device_price: float, catalogue: dict[str, Accelerator]
) -> Candidate:
    spec, slo = load_planning_spec(options.model), Slo.parse(options.slo)
    space = SearchSpace(
        devices=(find_accelerator(options.device, catalogue).name,),
        dollars_per_device_hour=device_price,
    )
    found = search(spec, demand, slo, space, catalogue)
    if not found.fleets:
        raise explain_infeasible(spec, demand, slo, space, catalogue, found)
    return found.fleets[0]


def _offers(
    options: CostRequest, usage: ApiUsage, fleet: Candidate, hourly: float, today: date
) -> tuple[tuple[ProviderOffer, ...], list[str]]:
    """The providers, cheapest first, and warnings about their prices."""
    offers, notes = [], []
    for price in _provider_prices(options.prices).values():
        stale = check_fresh(price.name, price.as_of, today, accept_stale=options.accept_stale)
        notes += [stale] if stale else []
        offers.append(_offer(price, usage, fleet, hourly))
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
