"""The catalogue of accelerators: dense peaks, memory, bandwidth and prices, with source and date.

Data sheets often give peaks with structured sparsity, which halve every utilisation that is
computed from them. Rows marked `sparse = true` are rejected, as are rows without a source or a
date. Prices change fastest: check `as_of`, and override them.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.resources import files

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput
from ridgeline.records.price import Commitment

NETWORK_BYTES_S = 50e9
"""400 Gbit/s per device: DGX H100 and HGX systems from 2023 to 2026, by their data sheets."""


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """USD per hour and device: from whom, under which commitment, by which source, and when.

    `region` is empty where the provider has one price for all.
    """

    usd_per_hour: float
    commitment: Commitment
    provider: str
    region: str = ""
    source: str
    as_of: str

    @property
    def terms(self) -> str:
        """The commitment, the provider and the region in words."""
        return ", ".join(part for part in (self.commitment, self.provider, self.region) if part)


class _ListedPrice(Price, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of a file of prices."""

    device: str


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the file."""

    name: str
    vendor: str
    kind: str
    dense_tflops: dict[str, float]
    memory_gb: float
    bandwidth_tb_s: float
    source: str = ""
    as_of: str = ""
    sparse: bool = False
    device_names: tuple[str, ...] = ()
    link_gb_s: float | None = None
    link_devices: int = 8
    tdp_w: float | None = None
    achievable: float | None = None
    note: str = ""
    price: tuple[Price, ...] = ()


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One device. `peak_flops` are DENSE operations per second by dtype; a multiply-add counts 2.

    `link_bytes_s` is one direction to its peers, `network_bytes_s` one direction to other nodes,
    and `link_devices` the number of devices that the link connects;
    `achievable` the measured share of the bfloat16 peak that plain matrix products reach;
    `device_names` are the names that drivers report.
    """

    name: str
    vendor: str
    kind: str
    peak_flops: dict[str, float]
    memory_bytes: int
    bandwidth_bytes_s: float
    source: str
    as_of: str
    device_names: tuple[str, ...] = ()
    link_bytes_s: float | None = None
    network_bytes_s: float = NETWORK_BYTES_S
    link_devices: int = 8
    tdp_w: float | None = None
    achievable: float | None = None
    note: str = ""
    prices: tuple[Price, ...] = ()

    def price(self, commitment: Commitment) -> Price | None:
        """The price under `commitment` that a bill should count with, or None without one.

        Reserved: the cheapest of the providers that also have the device on demand, so that like is
        compared with like; without one, and else, the newest month's price of the median provider
        (the higher of the middle two). Each provider counts with its cheapest region.
        """
        prices = [price for price in self.prices if price.commitment == commitment]
        if commitment.startswith("reserved"):
            own = [price for price in prices if self.on_demand_of(price.provider) is not None]
            if own:
                return min(own, key=lambda price: price.usd_per_hour)
        newest = max((price.as_of[:7] for price in prices), default="")
        cheapest: dict[str, Price] = {}
        for price in sorted(prices, key=lambda price: price.usd_per_hour):
            if price.as_of[:7] == newest:
                cheapest.setdefault(price.provider, price)
        ranked = list(cheapest.values())
        return ranked[len(ranked) // 2] if ranked else None

    def on_demand_of(self, provider: str) -> Price | None:
        """The provider's newest price on demand, of its cheapest region; None without one."""
        prices = [
            price
            for price in self.prices
            if price.commitment == "on-demand" and price.provider == provider
        ]
        newest = max((price.as_of[:7] for price in prices), default="")
        dated = [price for price in prices if price.as_of[:7] == newest]
        return min(dated, key=lambda price: price.usd_per_hour, default=None)

    def saving(self, price: Price) -> str:
        """What a spot or reserved price compares with, in words; "" for others."""
        if price.commitment in ("on-demand", "owned"):
            return ""
        own, others = self.on_demand_of(price.provider), self.price("on-demand")
        words = []
        if own is not None:
            words.append(f"on demand, {own.provider} asks ${own.usd_per_hour:.2f}")
        if others is not None and others.usd_per_hour < price.usd_per_hour:
            words.append(
                f"the median provider's ${others.usd_per_hour:.2f} on demand is less than this "
                "commitment costs"
            )
        return "; ".join(words)

    def peak(self, dtype: str) -> float:
        """Dense peak of `dtype` in operations/s; float16 and bfloat16 have the same.

        Raises BadInput if it is unknown.
        """
        twin = {"float16": "bfloat16", "bfloat16": "float16"}.get(dtype, dtype)
        peak = self.peak_flops.get(dtype, self.peak_flops.get(twin))
        if peak is None:
            known = ", ".join(self.peak_flops) or "none"
            raise BadInput(
                f"the catalogue has no dense peak of {self.name} in this dtype",
                value=dtype,
                limit=known,
            )
        return peak


def load_catalogue(text: str | None = None) -> dict[str, Accelerator]:
    """Every accelerator by name. `text` replaces the built-in catalogue.

    Raises BadInput for a row without source or date, with sparse rates, or with absurd numbers.
    """
    if text is None:
        home = files("ridgeline.hardware").joinpath("catalogue.toml")
        text = home.read_text(encoding="utf-8")
    try:
        document = tomllib.loads(text)
        rows = msgspec.convert(document.get("accelerator", []), list[_Row])
    except DECODE_ERRORS as error:
        raise BadInput("the accelerator catalogue is malformed", fix=str(error)) from None
    accelerators: dict[str, Accelerator] = {}
    for row in rows:
        _check(row)
        if row.name in accelerators:
            raise BadInput("two catalogue rows have the same name", value=row.name)
        accelerators[row.name] = _accelerator(row)
    return accelerators


def _check(row: _Row) -> None:
    _check_origin(row.name, row.source, row.as_of)
    for price in row.price:
        _check_price(row.name, price)
    if row.sparse:
        raise BadInput(
            "a catalogue row has rates with structured sparsity",
            value=row.name,
            fix="write the dense rates (usually half) and sparse = false",
        )
    for number in (row.memory_gb, row.bandwidth_tb_s, *row.dense_tflops.values()):
        _check_range(row.name, number)


def _check_price(name: str, price: Price) -> None:
    _check_origin(name, price.source, price.as_of)
    _check_range(name, price.usd_per_hour)


def _check_range(name: str, number: float) -> None:
    if not 0 < number < 1e6:
        raise BadInput(
            "a number in a catalogue row is out of range",
            value=f"{name}: {number}",
            limit="0 to 1e6",
        )


def _check_origin(name: str, source: str, as_of: str) -> None:
    """BadInput without a source and a date: a month (2026-08) or a day (2026-08-31)."""
    if not source.strip():
        raise BadInput("a catalogue row has no source", value=name, fix='add source = "…"')
    try:
        date.fromisoformat(as_of if len(as_of) == 10 else f"{as_of}-01")
    except ValueError:
        raise BadInput(
            "a catalogue row has no valid date",
            value=f"{name}: {as_of!r}",
            fix='write as_of = "2026-08"',
        ) from None


def _accelerator(row: _Row) -> Accelerator:
    return Accelerator(
        name=row.name,
        vendor=row.vendor,
        kind=row.kind,
        peak_flops={dtype: tflops * 1e12 for dtype, tflops in row.dense_tflops.items()},
        memory_bytes=int(row.memory_gb * 1e9),
        bandwidth_bytes_s=row.bandwidth_tb_s * 1e12,
        source=row.source,
        as_of=row.as_of,
        device_names=row.device_names,
        link_bytes_s=None if row.link_gb_s is None else row.link_gb_s * 1e9,
        link_devices=row.link_devices,
        tdp_w=row.tdp_w,
        achievable=row.achievable,
        note=row.note,
        prices=row.price,
    )


def load_device_prices(text: str) -> dict[str, list[Price]]:
    """Prices by device name, from the `[[price]]` rows of a TOML file.

    A row has the fields of a catalogue price and `device`, an accelerator's name in the catalogue.
    Raises BadInput for a malformed file, an unknown device, or a row without source or date.
    """
    try:
        rows = msgspec.convert(tomllib.loads(text).get("price", []), list[_ListedPrice])
    except DECODE_ERRORS as error:
        raise BadInput("the file of device prices is malformed", fix=str(error)) from None
    prices: dict[str, list[Price]] = {}
    for row in rows:
        device = find_accelerator(row.device).name
        _check_price(device, row)
        fields = msgspec.structs.asdict(row)
        del fields["device"]
        prices.setdefault(device, []).append(Price(**fields))
    return prices


def with_prices(
    catalogue: Mapping[str, Accelerator], prices: Mapping[str, Sequence[Price]]
) -> dict[str, Accelerator]:
    """The catalogue with `prices`, which replace those of the same provider and commitment."""
    merged = {}
    for name, device in catalogue.items():
        new = tuple(prices.get(name, ()))
        replaced = {(price.provider, price.commitment) for price in new}
        kept = [old for old in device.prices if (old.provider, old.commitment) not in replaced]
        merged[name] = msgspec.structs.replace(device, prices=(*kept, *new))
    return merged


def prices_toml(catalogue: Mapping[str, Accelerator]) -> str:
    """Every price of the catalogue as a TOML file that `load_device_prices` reads."""
    blocks = []
    for device in catalogue.values():
        for price in device.prices:
            fields = {"device": device.name, **msgspec.structs.asdict(price)}
            lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items() if value != ""]
            blocks.append("\n".join(("[[price]]", *lines)))
    return "\n\n".join(blocks) + "\n"


_OTHER_NAMES = {
    "a100-sxm": "a100-80-sxm",
    "a100-pcie": "a100-80-pcie",
    "b200-sxm": "b200",
    "b300-sxm": "b300",
    "gb200-sxm": "gb200",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
    "rtx-pro-6000": "rtx-6000-pro",
    "rtx-pro-6000-server": "rtx-6000-pro",
}
"""Names that other tools give to rows of the catalogue, whose underscores are hyphens."""

_MOST_MEANT = ("a100-80-sxm", "a100-80-pcie", "h100-sxm", "gh200-96", "rtx-4090", "apple-m1-max")
"""Of rows whose names begin alike, those that a short name usually means, the likeliest first."""


def find_accelerator(name: str, catalogue: dict[str, Accelerator] | None = None) -> Accelerator:
    """Find an accelerator by its catalogue name or its driver's device name.

    Raises BadInput for an unknown name, and for one that matches several rows: "h100" could be a
    card of 2.0, 3.35 or 3.9 TB/s.
    """
    rows = load_catalogue() if catalogue is None else catalogue
    wanted = name.strip().lower().replace("_", "-")
    wanted = _OTHER_NAMES.get(wanted, wanted)
    for row in rows.values():
        if wanted in (row.name, *(n.lower().replace("_", "-") for n in row.device_names)):
            return row
    several = [row for row in rows if row.startswith(f"{wanted}-")]
    several.sort(key=lambda row: _MOST_MEANT.index(row) if row in _MOST_MEANT else len(_MOST_MEANT))
    near = several or difflib.get_close_matches(wanted, rows, n=5, cutoff=0.4) or list(rows)
    what = "several accelerators match this name" if len(several) > 1 else "unknown accelerator"
    fix = "`ridgeline catalogue` lists them with their figures"
    if len(several) > 1:
        fix = f"name one of them; the most common is {near[0]}"
    raise BadInput(what, value=name, limit=", ".join(near), fix=fix)
