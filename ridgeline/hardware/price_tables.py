"""Device prices from SkyPilot's price tables: one CSV file per cloud, with a row per instance type.

The tables are public (github.com/skypilot-org/skypilot-catalog) and refreshed several times a day.
A row prices a whole instance with its host; divided by its devices it gives the price of one.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import Price
from ridgeline.records.price import Commitment

CLOUDS = {
    "aws": "AWS",
    "gcp": "Google Cloud",
    "azure": "Azure",
    "lambda": "Lambda",
    "runpod": "RunPod",
    "nebius": "Nebius",
}
"""Folder of a cloud's table → the name of the provider."""

_DEVICE_RULES: tuple[tuple[str, str, str], ...] = (
    # (device name in the table, pattern of the instance type, device name in the catalogue)
    ("T4", "", "t4"),
    ("A10", "", "a10"),
    ("A10G", "", "a10g"),
    ("L4", "", "l4"),
    ("L40S", "", "l40s"),
    ("RTX4090", "", "rtx-4090"),
    ("A100", "", "a100-40-sxm"),
    ("A100-80GB", r"Standard_NC|SECURE|COMMUNITY|pcie", "a100-80-pcie"),
    ("A100-80GB", "", "a100-80-sxm"),
    ("A100-80GB-SXM", "", "a100-80-sxm"),
    ("H100", r"Standard_NC", "h100-nvl"),
    ("H100", r"SECURE|COMMUNITY|pcie", "h100-pcie"),
    ("H100", "", "h100-sxm"),
    ("H100-SXM", "", "h100-sxm"),
    ("H100-NVL", "", "h100-nvl"),
    ("H100-MEGA", "", "h100-sxm"),
    ("GH200", "", "gh200-96"),
    ("H200", "", "h200-sxm"),
    ("H200-SXM", "", "h200-sxm"),
    ("B200", "", "b200"),
    ("B300", "", "b300"),
    ("GB200", "", "gb200"),
    ("MI300X", "", "mi300x"),
    ("Trainium2", "", "trainium2"),
    ("Inferentia2", "", "inferentia2"),
)


class PriceTable(msgspec.Struct, frozen=True, kw_only=True):
    """What a table holds: the cheapest price per device and commitment, and names not known here.

    `unknown`: devices of the table without a row in the catalogue, sorted.
    """

    prices: dict[str, list[Price]]
    unknown: tuple[str, ...]


def read_price_table(text: str, cloud: str, *, source: str, as_of: str) -> PriceTable:
    """The on-demand and spot prices of one cloud's CSV table, each from its cheapest region.

    Raises BadInput if columns are missing or a price is not a number.
    """
    cheapest: dict[tuple[str, Commitment], Price] = {}
    unknown: set[str] = set()
    for row in _rows(text, cloud):
        device = _device_name(row)
        if device is None:
            unknown.add(row["AcceleratorName"])
            continue
        for price in _row_prices(row, cloud, source=source, as_of=as_of):
            key = (device, price.commitment)
            if key not in cheapest or price.usd_per_hour < cheapest[key].usd_per_hour:
                cheapest[key] = price
    prices: dict[str, list[Price]] = {}
    for (device, _), price in cheapest.items():
        prices.setdefault(device, []).append(price)
    return PriceTable(prices=prices, unknown=tuple(sorted(unknown)))


def merge_prices(tables: Iterable[Mapping[str, list[Price]]]) -> dict[str, list[Price]]:
    """The prices of several tables by device."""
    merged: dict[str, list[Price]] = {}
    for table in tables:
        for device, prices in table.items():
            merged.setdefault(device, []).extend(prices)
    return merged


def _rows(text: str, cloud: str) -> Iterator[dict[str, str]]:
    """The rows of instances that have an accelerator, their host included."""
    reader = csv.DictReader(io.StringIO(text))
    needed = {"InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region"}
    missing = sorted(needed - set(reader.fieldnames or ()))
    if missing:
        raise BadInput(
            f"the price table of {cloud} lacks columns",
            value=", ".join(missing),
            fix="pass a vms.csv of skypilot-catalog",
        )
    for row in reader:
        # Google lists accelerators without a host under no instance type: those prices are partial.
        if row["AcceleratorName"] and row["InstanceType"]:
            yield row


def _device_name(row: Mapping[str, str]) -> str | None:
    for name, instance, device in _DEVICE_RULES:
        if row["AcceleratorName"] == name and re.search(instance, row["InstanceType"]):
            return device
    return None


def _row_prices(row: Mapping[str, str], cloud: str, *, source: str, as_of: str) -> Iterator[Price]:
    columns: tuple[tuple[str, Commitment], ...] = (("Price", "on-demand"), ("SpotPrice", "spot"))
    for column, commitment in columns:
        text = row.get(column)
        if not text:
            continue
        try:
            dollars = float(text) / float(row["AcceleratorCount"])
        except (ValueError, ZeroDivisionError):
            raise BadInput(
                f"the price table of {cloud} has a bad row",
                value=f"{row['InstanceType']}: {column} {text!r}, "
                f"{row['AcceleratorCount']!r} devices",
                limit="a price and a number of devices",
            ) from None
        if not 0 < dollars < 1e6:  # not offered in this region
            continue
        yield Price(
            usd_per_hour=round(dollars, 4),
            commitment=commitment,
            provider=CLOUDS.get(cloud, cloud),
            region=row["Region"],
            source=source,
            as_of=as_of,
        )
