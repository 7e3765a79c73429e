"""`ridgeline cost`: a fleet of one's own against providers, for the same requests."""

from __future__ import annotations

from datetime import date
from math import inf
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import Accelerator, find_accelerator
from ridgeline.plan.cost.api_prices import (
    STALE_DAYS,
    ApiPrice,
    RequestCost,
    Usage,
    age_days,
    check_fresh,
    load_prices,
    reads_per_hour_to_pay,
    request_cost,
    reuses_to_pay,
)
from ridgeline.plan.cost.ownership import BreakEven, Owned, Spot, break_even, kwh_per_million
from ridgeline.plan.fleet.demand import Demand, demand_of
from ridgeline.plan.fleet.infeasible import impossible
from ridgeline.plan.fleet.search import Candidate, Space, quoted_price, search
from ridgeline.plan.model.outline import load_outline
from ridgeline.records import Slo
from ridgeline.report.json_line import json_line
from ridgeline.workflows.bench.workload_lengths import workload_lengths
from ridgeline.workflows.planning.predict import read_catalogue


class CostOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command's flags."""

    model: str
    device: str
    workload: str | None
    isl: int
    osl: int
    rate: float
    slo: str
    prefix: int
    hit_rate: float
    num_prefixes: int
    batch: bool
    long_lived: bool
    price_per_hour: float | None
    owned: Owned | None
    spot: Spot | None
    prices: Path | None
    accept_stale: bool
    catalogue: Path | None
    calibration: Path | None
    today: date

    def __post_init__(self) -> None:
        """BadInput for a number that no bill can be made of, by its flag."""
        least = {"isl": 1, "osl": 1, "prefix": 0, "num_prefixes": 1}
        for field, lowest in least.items():
            if (value := getattr(self, field)) < lowest:
                flag = "--" + field.removeprefix("num_")
                raise BadInput(f"{flag} is too small", value=value, limit=f">= {lowest}")
        if not 0 <= self.hit_rate <= 1:
            raise BadInput("--hit-rate is a share", value=self.hit_rate, limit="0 to 1")
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < inf:
            raise BadInput("--price-per-hour", value=self.price_per_hour, limit=">= 0 $/hour")


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The same fleet, paid for in another way. Dollars."""

    name: str
    per_device_hour: float
    per_month: float
    per_request: float
    as_of: str
    source: str


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One provider against the fleet. Dollars."""

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


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is told."""

    fleet: Candidate
    dollars_per_hour: float
    dollars_per_month: float
    dollars_per_request: float
    kwh_per_million_output: float | None
    basis: str
    terms: tuple[Terms, ...]
    offers: tuple[Offer, ...]
    notes: tuple[str, ...]


def command(options: CostOptions, as_json: bool) -> int:
    """Compare and print; the exit code."""
    demand = _demand(options)
    device = find_accelerator(
        options.device, read_catalogue(options.catalogue, options.calibration)
    )
    per_device, basis, notes = _per_device(options, device)
    fleet = _fleet(options, demand, per_device)
    usage = Usage(
        isl=demand.isl,
        osl=demand.osl,
        rate=options.rate,
        prefix=min(options.prefix, demand.isl),
        hit_rate=options.hit_rate,
        num_prefixes=options.num_prefixes,
        batch=options.batch,
        long_lived=options.long_lived,
    )
    hourly = per_device * fleet.num_devices
    bill = _bill(options, (fleet, hourly, basis), usage, notes)
    bill = msgspec.structs.replace(bill, terms=_terms(options, device, fleet))
    if as_json:
        print(json_line(bill))
    else:
        _print(bill, usage, Console(highlight=False))
    return 0


def _demand(options: CostOptions) -> Demand:
    lengths = [(options.isl, options.osl)]
    if options.workload is not None:
        lengths = workload_lengths(options.workload, 1000)
    mean = sum(prompt for prompt, _ in lengths) / len(lengths)
    cached = min(options.prefix, mean) * options.hit_rate / mean
    return demand_of(lengths, options.rate, cached)


def _per_device(options: CostOptions, device: Accelerator) -> tuple[float, str, list[str]]:
    """(dollars per device and hour, what they are, warnings)."""
    if options.owned is not None:
        return options.owned.dollars_per_hour, f"owned for {options.owned.years:g} years", []
    if options.price_per_hour is not None:
        return options.price_per_hour, "your price", []
    price = quoted_price(device)
    if price is None:
        raise BadInput(
            f"the catalogue has no price of {device.name}",
            value=device.name,
            fix="give --price-per-hour, or --owned-dollars",
        )
    stale = check_fresh(device.name, price.as_of, options.today, accept_stale=options.accept_stale)
    basis = f"{price.terms}, {price.source}, {price.as_of}"
    return price.usd_per_hour, basis, [stale] if stale else []


def _terms(options: CostOptions, device: Accelerator, fleet: Candidate) -> tuple[Terms, ...]:
    """Every way to pay for the fleet that is known, cheapest first; stale prices only where they
    are accepted."""
    month = options.today.isoformat()[:7]
    rows = [
        (price.terms, price.usd_per_hour, price.as_of, price.source)
        for price in device.prices
        if options.accept_stale or age_days(device.name, price.as_of, options.today) <= STALE_DAYS
    ]
    if options.price_per_hour is not None:
        rows.append(("your price", options.price_per_hour, month, "you"))
    if options.spot is not None:
        told = f"spot, {options.spot.interruptions_per_hour:g} interruptions an hour"
        rows.append((told, options.spot.dollars_per_hour, month, "you"))
    if options.owned is not None:
        told = f"owned for {options.owned.years:g} years, with power"
        rows.append((told, options.owned.dollars_per_hour, month, "you"))
    found = [
        Terms(
            name=name,
            per_device_hour=dollars,
            per_month=dollars * fleet.num_devices * 730,
            per_request=dollars * fleet.num_devices / 3600 / options.rate,
            as_of=as_of,
            source=source,
        )
        for name, dollars, as_of, source in rows
    ]
    return tuple(sorted(found, key=lambda each: each.per_device_hour))


def _fleet(options: CostOptions, demand: Demand, per_device: float) -> Candidate:
    outline, catalogue = (
        load_outline(options.model),
        read_catalogue(options.catalogue, options.calibration),
    )
    space = Space(
        devices=(find_accelerator(options.device, catalogue).name,),
        dollars_per_device_hour=per_device,
    )
    slo = Slo.parse(options.slo)
    found = search(outline, demand, slo, space, catalogue)
    if not found.fleets:
        raise impossible(outline, demand, slo, space, catalogue, found)
    return found.fleets[0]


def _bill(
    options: CostOptions,
    own: tuple[Candidate, float, str],
    usage: Usage,
    notes: list[str],
) -> Bill:
    fleet, hourly, basis = own
    offers = []
    for price in _prices(options).values():
        stale = check_fresh(
            price.name, price.as_of, options.today, accept_stale=options.accept_stale
        )
        notes += [stale] if stale else []
        offers.append(_offer(price, usage, fleet, hourly))
    joules = fleet.joules_per_output_token
    return Bill(
        fleet=fleet,
        dollars_per_hour=hourly,
        dollars_per_month=hourly * 730,
        dollars_per_request=hourly / 3600 / usage.rate,
        kwh_per_million_output=None if joules is None else kwh_per_million(joules),
        basis=basis,
        terms=(),
        offers=tuple(sorted(offers, key=lambda offer: offer.total_per_request)),
        notes=tuple(notes),
    )


def _prices(options: CostOptions) -> dict[str, ApiPrice]:
    if options.prices is None:
        return load_prices()
    try:
        return load_prices(options.prices.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            "cannot read the prices", value=str(options.prices), fix=str(error)
        ) from None


def _offer(price: ApiPrice, usage: Usage, fleet: Candidate, hourly: float) -> Offer:
    cost = request_cost(price, usage)
    cached = usage.prefix > 0 and cost.caches
    return Offer(
        name=price.name,
        provider=price.provider,
        per_request=cost,
        total_per_request=cost.total,
        per_month=cost.total * usage.rate * 3600 * 730,
        break_even=break_even(fleet, hourly, cost.total),
        reuses_to_pay=reuses_to_pay(price, long_lived=usage.long_lived) if cached else None,
        reads_per_hour_to_pay=reads_per_hour_to_pay(price)
        if cached and price.storage_per_hour
        else None,
        as_of=price.as_of,
        source=price.source,
    )


def _print(bill: Bill, usage: Usage, out: Console) -> None:
    fleet = bill.fleet
    out.print(
        f"{usage.rate:g} requests/s of {usage.isl} in ({usage.prefix} shared, "
        f"{usage.hit_rate:.0%} hit), {usage.osl} out{', as a batch' if usage.batch else ''}"
    )
    out.print(
        f"own: {fleet.num_replicas} x {fleet.device} {fleet.layout} {fleet.weight_dtype}: "
        f"${bill.dollars_per_hour:,.2f} an hour, ${bill.dollars_per_month:,.0f} a month, "
        f"${1000 * bill.dollars_per_request:.3g} per 1,000 requests ({bill.basis})",
        soft_wrap=True,
    )
    if bill.kwh_per_million_output is not None:
        out.print(f"energy: {bill.kwh_per_million_output:.3g} kWh per 1M output tokens at most")
    if len(bill.terms) > 1:
        out.print(_terms_table(bill))
        out.print()
    out.print(_offers(bill))
    for note in (*bill.notes, "models differ in quality: compare what they answer, too"):
        out.print(f"- {note}", style="dim", soft_wrap=True)


def _terms_table(bill: Bill) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("the same fleet, paid for as", overflow="fold")
    for name in ("$/device/h", "$ a month", "$ per 1,000", "as of"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in bill.terms:
        table.add_row(
            each.name,
            f"{each.per_device_hour:.3g}",
            f"{each.per_month:,.0f}",
            f"{1000 * each.per_request:.3g}",
            each.as_of,
        )
    return table


def _offers(bill: Bill) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("$ per 1,000 requests", no_wrap=True)
    for name in ("all", "input", "cache", "output", "a month", "own from", "as of"):
        table.add_column(name, justify="right", no_wrap=True)
    for offer in bill.offers:
        c, even = offer.per_request, offer.break_even
        parts = (c.total, c.input, c.cached_read + c.cache_write + c.storage, c.output)
        table.add_row(
            offer.name,
            *(f"{1000 * part:.3g}" for part in parts),
            f"{offer.per_month:,.0f}",
            "never" if even.rate is None else f"{even.rate:.3g}/s",
            offer.as_of,
        )
    return table
