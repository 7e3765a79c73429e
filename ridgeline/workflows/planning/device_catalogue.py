"""Accelerators that a planning workflow may name: the catalogue, and a calibrated machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import (
    Accelerator,
    find_accelerator,
    load_catalogue,
    load_device_prices,
    with_prices,
)
from ridgeline.plan.calibration.calibration import MeasuredDevice, load_calibration

MAX_DEVICES = 10_000


def read_catalogue(
    path: Path | None, calibration: Path | None = None, prices: Path | None = None
) -> dict[str, Accelerator]:
    """Accelerators by name: of the file, or the built-in ones. A calibrated device comes first.

    `prices` names a TOML file of prices, which replace those of the same provider and commitment.
    Raises BadInput if a file cannot be read.
    """
    rows = _read_devices(path, calibration)
    if prices is None:
        return rows
    try:
        return with_prices(rows, load_device_prices(prices.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("cannot read the prices", value=str(prices), fix=str(error)) from None


def _read_devices(path: Path | None, calibration: Path | None) -> dict[str, Accelerator]:
    measured = None if calibration is None else load_calibration(calibration).accelerator()
    rows = {} if measured is None else {measured.name: measured}
    if path is None:
        return {**rows, **load_catalogue()}
    try:
        return {**rows, **load_catalogue(path.read_text(encoding="utf-8"))}
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("cannot read the catalogue", value=str(path), fix=str(error)) from None


def default_device(name: str | None, catalogue: Mapping[str, Accelerator]) -> str | None:
    """`name`, or the calibrated device if there is one."""
    measured = (row.name for row in catalogue.values() if isinstance(row, MeasuredDevice))
    return name or next(measured, None)


def parse_stock(text: str, catalogue: Mapping[str, Accelerator]) -> dict[str, int]:
    """`h100-sxm=2,l4=4` as devices by name; a name without a count is one device."""
    stock: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.partition("=")
        if not (count or "1").isdigit() or int(count or 1) < 1:
            raise BadInput(
                "--accelerator needs names and counts", value=part, limit="h100-sxm=2,l4=4"
            )
        full_name = find_accelerator(name, dict(catalogue)).name
        stock[full_name] = stock.get(full_name, 0) + int(count or 1)
    if sum(stock.values()) > MAX_DEVICES:
        raise BadInput(
            "--accelerator names too many devices", value=text, limit=f"{MAX_DEVICES:,} in all"
        )
    return stock
