"""`ridgeline catalogue`, and the bill at the top of a plan."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import httpx
import pytest

from ridgeline.cli.main import main
from ridgeline.config.planning import PlanOptions
from ridgeline.config.tools import CatalogueOptions
from ridgeline.errors import BadInput, DownloadFailed
from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.plan.calibration.published_efficiency import efficiency_of, fitted_parameters
from ridgeline.workflows.planning import catalogue as workflow
from ridgeline.workflows.planning.plan import plan

HEADER = "InstanceType,AcceleratorName,AcceleratorCount,Price,Region,SpotPrice\n"
TODAY = date(2026, 11, 27)


def test_devices_are_listed_with_their_prices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalogue"]) == 0
    out = capsys.readouterr().out
    assert "h100-sxm" in out and all(len(line) <= 80 for line in out.splitlines())
    assert main(["catalogue", "h100-sxm", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert {"on-demand", "spot", "reserved-3y"} <= {p["price"]["commitment"] for p in row["prices"]}


def test_old_prices_are_marked() -> None:
    (row,) = workflow.catalogue(CatalogueOptions(device="h100-sxm", today=TODAY)).rows
    stale = {p.price.provider for p in row.prices if p.stale}
    assert "CoreWeave" in stale and "Nebius" not in stale


def test_tables_of_a_folder_need_a_date_and_reach_the_plan(tmp_path: Path) -> None:
    table = tmp_path / "tables" / "aws" / "vms.csv"
    table.parent.mkdir(parents=True)
    table.write_text(HEADER + "p5.48xlarge,H100,8,800,us-east-1,400\n")
    folder, prices = tmp_path / "tables", tmp_path / "prices.toml"
    with pytest.raises(BadInput, match="--as-of"):
        workflow.catalogue(CatalogueOptions(prices=folder))
    options = CatalogueOptions(prices=folder, as_of=date(2026, 12, 1), output=prices)
    result = workflow.catalogue(options)
    assert any("no table: Google Cloud" in note for note in result.notes)
    found = plan(
        PlanOptions(
            model="llama-3.1-8b",
            accelerator="h100-sxm",
            max_devices=1,
            quantization="bfloat16",
            device_prices=prices,
            today=date(2026, 12, 2),
        )
    )
    assert found.bill is not None and found.bill.per_hour == 100 * found.fleets[0].num_devices
    assert "AWS, us-east-1" in found.bill.terms
    assert "the API is cheaper" in found.bill.sentence and "By API" in found.bill.sentence
    spot = workflow.catalogue(CatalogueOptions(prices=prices, commitment="spot"))
    chosen = {row.device.name: row.chosen for row in spot.rows}["h100-sxm"]
    assert chosen is not None and chosen.price.usd_per_hour == 50


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no price tables"):
        workflow.catalogue(CatalogueOptions(prices=tmp_path, as_of=TODAY))


def test_update_downloads_every_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def get(self: httpx.Client, url: str) -> httpx.Response:
        asked.append(url)
        text = HEADER + "gpu_8x_b200_sxm6,B200,8,40,eu,\n"
        return httpx.Response(200, text=text, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx.Client, "get", get)
    options = CatalogueOptions(device="b200", update=True, tables_url="http://t/", today=TODAY)
    (row,) = workflow.catalogue(options).rows
    assert asked[0] == "http://t/aws/vms.csv" and len(asked) == 6
    assert row.chosen is not None and row.chosen.price.usd_per_hour == 5.0
    assert row.chosen.price.as_of == "2026-11-27"


def test_a_failed_download_names_the_address_and_another_way() -> None:
    options = CatalogueOptions(update=True, tables_url="http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match=r"127\.0\.0\.1:9/aws/vms\.csv") as caught:
        workflow.catalogue(options)
    assert "--prices" in str(caught.value)


def test_plan_without_a_price_under_the_commitment_says_so() -> None:
    found = plan(
        PlanOptions(
            model="llama-3.1-8b",
            accelerator="h100-nvl",
            max_devices=1,
            quantization="bfloat16",
            commitment="reserved-1y",
            today=TODAY,
        )
    )
    assert found.bill is None
    assert any("no reserved-1y price of h100-nvl" in note for note in found.notes)


def test_a_device_has_its_fitted_numbers_with_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        (fitted.name, fitted.engine): fitted
        for fitted in fitted_parameters(load_catalogue()["b200"])
    }
    assert {"bandwidth", "link", "host", "layer_s"} <= {name for name, _ in found}
    for fitted in found.values():
        assert 0 < fitted.low <= fitted.value * 1.001 and fitted.value <= fitted.high * 1.001
    efficiency = efficiency_of(load_catalogue()["h100-sxm"], "sglang")
    assert found["layer_s", "sglang"].value == efficiency.layer_s
    assert ("host", "") not in {
        (fitted.name, fitted.engine) for fitted in fitted_parameters(load_catalogue()["h100-sxm"])
    }
    assert main(["catalogue", "b200"]) == 0
    assert "fitted numbers" in capsys.readouterr().out
