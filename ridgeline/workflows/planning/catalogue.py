"""The catalogue of accelerators with their prices, and fresh prices from SkyPilot's tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path

import httpx
import msgspec

from ridgeline.config.tools import CatalogueOptions
from ridgeline.errors import BadInput, DownloadFailed
from ridgeline.hardware.catalogue import (
    Accelerator,
    Price,
    find_accelerator,
    load_device_prices,
    prices_toml,
    with_prices,
)
from ridgeline.hardware.price_tables import CLOUDS, merge_prices, read_price_table
from ridgeline.plan.calibration.published_efficiency import FittedParameter, fitted_parameters
from ridgeline.plan.cost.api_prices import STALE_DAYS, age_days
from ridgeline.records.price import Commitment
from ridgeline.records.progress import Observer, silent, stage
from ridgeline.report.files import write_file
from ridgeline.report.result import Result
from ridgeline.workflows.planning.device_catalogue import read_catalogue

_TIMEOUT_S = 60.0


class DevicePrice(msgspec.Struct, frozen=True, kw_only=True):
    """One price of a device, and its age in days."""

    price: Price
    age_days: int

    @property
    def stale(self) -> bool:
        """Too old to plan with."""
        return self.age_days > STALE_DAYS


class CatalogueRow(msgspec.Struct, frozen=True, kw_only=True):
    """A device, the price that plans count with under the chosen commitment, and all others.

    `parameters`: the fitted numbers that predictions on it use, where one device was asked for.
    """

    device: Accelerator
    chosen: DevicePrice | None
    prices: tuple[DevicePrice, ...]
    parameters: tuple[FittedParameter, ...] = ()


class CatalogueResult(Result, frozen=True, kw_only=True):
    """The devices by name, and what could not be read from price tables."""

    commitment: Commitment
    rows: tuple[CatalogueRow, ...]
    notes: tuple[str, ...] = ()


def catalogue(options: CatalogueOptions, observer: Observer = silent) -> CatalogueResult:
    """The catalogue, with prices added from files or downloaded tables. Raises UserError."""
    devices = read_catalogue(options.catalogue)
    today = options.today or date.today()
    notes: list[str] = []
    if options.prices is not None:
        new, unknown = _read_prices(options.prices, options.as_of)
        devices, notes = with_prices(devices, new), unknown
    if options.update:
        new, unknown = _download_prices(options.tables_url, today, observer)
        devices, notes = with_prices(devices, new), [*notes, *unknown]
    if options.output is not None:
        write_file(options.output, [prices_toml(devices).encode()])
    names = [options.device] if options.device is not None else list(devices)
    rows = [_row(find_accelerator(name, devices), options.commitment, today) for name in names]
    if options.device is not None:
        parameters = fitted_parameters(rows[0].device)
        rows = [msgspec.structs.replace(rows[0], parameters=parameters)]
    return CatalogueResult(commitment=options.commitment, rows=tuple(rows), notes=tuple(notes))


def _row(device: Accelerator, commitment: Commitment, today: date) -> CatalogueRow:
    prices = [
        DevicePrice(price=price, age_days=age_days(device.name, price.as_of, today))
        for price in device.prices
    ]
    prices.sort(key=lambda row: (row.price.commitment, row.price.usd_per_hour))
    chosen = device.price(commitment)
    return CatalogueRow(
        device=device,
        chosen=next((row for row in prices if row.price is chosen), None),
        prices=tuple(prices),
    )


def _read_prices(path: Path, as_of: date | None) -> tuple[dict[str, list[Price]], list[str]]:
    """Prices of a TOML file, or of a folder of tables (CLOUD/vms.csv); and notes."""
    if not path.is_dir():
        try:
            return load_device_prices(path.read_text(encoding="utf-8")), []
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput("cannot read the prices", value=str(path), fix=str(error)) from None
    if as_of is None:
        raise BadInput(
            "price tables in a folder have no date",
            value=str(path),
            fix="say when they were fetched with --as-of 2026-11-27",
        )
    files = {cloud: path / cloud / "vms.csv" for cloud in CLOUDS}
    texts = {
        cloud: file.read_text(encoding="utf-8") for cloud, file in files.items() if file.is_file()
    }
    if not texts:
        raise BadInput(
            "the folder has no price tables",
            value=str(path),
            limit=", ".join(f"{cloud}/vms.csv" for cloud in CLOUDS),
        )
    return _read_tables(texts, as_of.isoformat())


def _download_prices(
    url: str, today: date, observer: Observer
) -> tuple[dict[str, list[Price]], list[str]]:
    """The prices of every cloud's table at `url`; and notes."""
    texts: dict[str, str] = {}
    with (
        stage(observer, "prices", total=len(CLOUDS), unit="clouds"),
        httpx.Client(follow_redirects=True, timeout=_TIMEOUT_S) as client,
    ):
        for cloud in CLOUDS:
            address = f"{url.rstrip('/')}/{cloud}/vms.csv"
            try:
                response = client.get(address).raise_for_status()
            except httpx.HTTPError as error:
                raise DownloadFailed(
                    "the prices could not be downloaded",
                    value=f"{address}: {str(error) or type(error).__name__}",
                    fix="check the network, or pass tables that you have with --prices FOLDER",
                ) from None
            texts[cloud] = response.text
    return _read_tables(texts, today.isoformat())


def _read_tables(texts: Mapping[str, str], as_of: str) -> tuple[dict[str, list[Price]], list[str]]:
    tables = {
        cloud: read_price_table(
            text, cloud, source=f"skypilot-org/skypilot-catalog, {cloud}/vms.csv", as_of=as_of
        )
        for cloud, text in texts.items()
    }
    unknown = sorted({name for table in tables.values() for name in table.unknown})
    missing = [CLOUDS[cloud] for cloud in CLOUDS if cloud not in texts]
    notes = [
        *_note("not in the catalogue, their prices were left out", unknown),
        *_note("no table", missing),
    ]
    return merge_prices(table.prices for table in tables.values()), notes


def _note(what: str, names: Iterable[str]) -> list[str]:
    listed = ", ".join(names)
    return [f"{what}: {listed}"] if listed else []
