"""Place several models on a stock of devices."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput
from ridgeline.plan.fleet.packing import Packing, Tenant
from ridgeline.plan.fleet.packing import pack as place_tenants
from ridgeline.report.json_line import plain
from ridgeline.report.result import Result
from ridgeline.workflows.planning.device_catalogue import parse_stock, read_catalogue

Row = TypeVar("Row", bound=msgspec.Struct)


class PackResult(Result, frozen=True, kw_only=True):
    """Which models share which device."""

    packing: Packing

    def to_dict(self) -> dict[str, object]:
        return dict(plain(self.packing))


def pack(models: Path, stock: str, *, catalogue: Path | None = None) -> PackResult:
    """Place the models of a TOML file ([[model]] rows) on devices such as `h100-sxm=2,l4=4`.

    Raises UserError if they do not fit.
    """
    rows = read_catalogue(catalogue)
    return PackResult(
        packing=place_tenants(read_model_rows(models, Tenant), parse_stock(stock, rows), rows)
    )


def read_model_rows(path: Path, kind: type[Row]) -> list[Row]:
    """The [[model]] rows of a TOML file. Raises BadInput if it cannot be read or has none."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        rows = msgspec.convert(document.get("model", []), list[kind])  # type: ignore[valid-type]  # a type at run time
    except (OSError, *DECODE_ERRORS) as error:
        raise BadInput("cannot read the models", value=str(path), fix=str(error)) from None
    if not rows:
        raise BadInput(
            "the file names no models", value=str(path), fix="write [[model]] rows in it"
        )
    return rows
