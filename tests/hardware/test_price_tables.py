"""Prices of devices from SkyPilot's tables and from files."""

from __future__ import annotations

import msgspec
import pytest

from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import (
    Price,
    load_catalogue,
    load_device_prices,
    prices_toml,
    with_prices,
)
from ridgeline.hardware.price_tables import read_price_table
from ridgeline.records.price import Commitment

HEADER = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,SpotPrice\n"


def read(rows: str, cloud: str = "aws") -> dict[str, list[Price]]:
    return read_price_table(HEADER + rows, cloud, source="s", as_of="2026-11-27").prices


def test_price_is_of_one_device_in_the_cheapest_region() -> None:
    rows = (
        "p5.48xlarge,H100,8,192,2048,55.04,us-east-1,20.0\n"
        "p5.48xlarge,H100,8,192,2048,44.0,us-east-2,24.0\n"
        "m7i.large,,,2,8,0.1,us-east-1,\n"
    )
    (on_demand, spot) = read(rows)["h100-sxm"]
    assert (on_demand.usd_per_hour, on_demand.region) == (5.5, "us-east-2")
    assert (spot.usd_per_hour, spot.region, spot.commitment) == (2.5, "us-east-1", "spot")
    assert on_demand.terms == "on-demand, AWS, us-east-2"


@pytest.mark.parametrize(
    ("cloud", "row", "device"),
    [
        ("azure", "Standard_NC40ads_H100_v5,H100,1,40,320,6.98,eastus,", "h100-nvl"),
        ("azure", "Standard_ND96isr_H100_v5,H100,8,96,1900,98.3,eastus,", "h100-sxm"),
        ("azure", "Standard_NC24ads_A100_v4,A100-80GB,1,24,220,3.67,eastus,", "a100-80-pcie"),
        ("azure", "Standard_ND96amsr_A100_v4,A100-80GB,8,96,1900,32.8,eastus,", "a100-80-sxm"),
        ("runpod", "1x_A100-80GB_SECURE,A100-80GB,1,8,117,1.39,CA,1.39", "a100-80-pcie"),
        ("lambda", "gpu_1x_h100_pcie,H100,1,26,200,2.86,us-east-1,", "h100-pcie"),
        ("lambda", "gpu_1x_h100_sxm5,H100,1,26,225,3.78,us-east-1,", "h100-sxm"),
        ("gcp", "a3-megagpu-8g,H100-MEGA,8,208,1872,92.2,us-east5,", "h100-sxm"),
    ],
)
def test_form_factor_follows_from_the_instance_type(cloud: str, row: str, device: str) -> None:
    assert list(read(row + "\n", cloud)) == [device]


def test_partial_prices_and_unknown_devices_are_left_out_and_named() -> None:
    rows = ",T4,1,,,0.35,us-east1,\nx,Quantum9,1,1,1,2.0,r,\ng5,A10G,1,4,16,0,r,\n"
    table = read_price_table(HEADER + rows, "gcp", source="s", as_of="2026-11-27")
    assert table.prices == {} and table.unknown == ("Quantum9",)


def test_reserved_price_is_of_a_provider_that_has_the_device_on_demand() -> None:
    def price(usd: float, provider: str, commitment: Commitment, as_of: str) -> Price:
        return Price(
            usd_per_hour=usd, commitment=commitment, provider=provider, source="s", as_of=as_of
        )

    prices = [
        price(1, "a market", "reserved-3y", "2026-11"),
        price(4, "a", "reserved-3y", "2026-08"),
        price(5, "b", "reserved-3y", "2026-11"),
        price(11, "a", "on-demand", "2026-10"),
        price(3, "c", "on-demand", "2026-10"),
        price(3, "d", "on-demand", "2026-10"),
        price(6, "b", "on-demand", "2026-09"),
    ]
    device = msgspec.structs.replace(load_catalogue()["t4"], prices=tuple(prices))
    chosen = device.price("reserved-3y")
    assert chosen is not None and (chosen.usd_per_hour, chosen.provider) == (4, "a")
    assert "a asks $11.00" in device.saving(chosen) and "$3.00" in device.saving(chosen)
    only_market = msgspec.structs.replace(device, prices=tuple(prices[:1]))
    assert only_market.price("reserved-3y") == prices[0]
    assert device.saving(prices[4]) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "lacks columns"),
        (HEADER + "p5,H100,0,1,1,5.0,r,\n", "bad row"),
        (HEADER + "p5,H100,8,1,1,much,r,\n", "bad row"),
    ],
)
def test_malformed_tables_are_refused(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        read_price_table(text, "aws", source="s", as_of="2026-11-27")


def test_prices_are_written_and_read_back() -> None:
    devices = load_catalogue()
    read_back = load_device_prices(prices_toml(devices))
    assert read_back == {name: list(row.prices) for name, row in devices.items() if row.prices}


def test_new_prices_replace_those_of_the_same_provider_and_commitment() -> None:
    devices = load_catalogue()
    former = next(p for p in devices["h100-sxm"].prices if p.provider == "Nebius")
    row = Price(
        usd_per_hour=9.0,
        commitment=former.commitment,
        provider="Nebius",
        source="s",
        as_of="2026-12-01",
    )
    merged = with_prices(devices, {"h100-sxm": [row]})
    assert former not in merged["h100-sxm"].prices
    assert len(merged["h100-sxm"].prices) == len(devices["h100-sxm"].prices)
    assert merged["h100-sxm"].price("on-demand") == row  # of the newest month
    assert merged["h200-sxm"] == devices["h200-sxm"]


def test_median_provider_of_the_newest_month_counts() -> None:
    def price(usd: float, provider: str, as_of: str = "2026-11") -> Price:
        return Price(
            usd_per_hour=usd, commitment="spot", provider=provider, source="s", as_of=as_of
        )

    prices = [price(3, "b"), price(1, "a"), price(2, "a"), price(9, "c"), price(5, "d", "2026-10")]
    device = with_prices(load_catalogue(), {"t4": prices})["t4"]
    chosen = device.price("spot")
    assert chosen is not None and (chosen.usd_per_hour, chosen.provider) == (3, "b")
    assert device.price("reserved-3y") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[price]]\ndevice = "h100"', "missing required field"),
        ("x = [", "malformed"),
    ],
)
def test_malformed_price_files_are_refused(text: str, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_device_prices(text)
    assert words in str(caught.value)
