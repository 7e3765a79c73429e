"""Prices of providers by their three rules, of fleets of one's own, and where they meet."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.cost.api_prices import (
    ApiPrice,
    ApiUsage,
    break_even_reads_per_hour,
    break_even_reuses,
    check_fresh,
    load_prices,
    request_cost,
)
from ridgeline.plan.cost.ownership import OwnedDevice, SpotDevice, break_even, kwh_per_million
from ridgeline.plan.fleet.demand import Demand
from ridgeline.plan.fleet.search import SearchSpace, search
from ridgeline.records import Slo

PRICES = load_prices()
ANTHROPIC, GEMINI, OPENAI = (
    PRICES[name] for name in ("claude-sonnet-4.6", "gemini-2.5-pro", "gpt-5.4")
)


def test_every_price_has_a_source_and_a_date() -> None:
    for row in PRICES.values():
        assert row.source and date.fromisoformat(row.as_of)
        assert {row.rule for row in PRICES.values()} == {"automatic", "breakpoint", "stored"}


def test_cost_without_a_shared_prefix_is_tokens_times_price() -> None:
    found = request_cost(OPENAI, ApiUsage(isl=2000, osl=100, rate=1.0))
    assert found.total == pytest.approx((2000 * 2.5 + 100 * 15) / 1e6)
    halved = request_cost(OPENAI, ApiUsage(isl=2000, osl=100, rate=1.0, batch=True))
    assert halved.total == pytest.approx(found.total / 2)


def test_long_prompts_have_their_own_rates_or_none() -> None:
    """A quarter of a million tokens cost twice as much; unknown rates are no price."""
    usage = ApiUsage(isl=250_000, osl=300, rate=0.01)
    assert request_cost(GEMINI, usage).total == pytest.approx((250_000 * 2.5 + 300 * 15) / 1e6)
    at_the_limit = request_cost(GEMINI, ApiUsage(isl=200_000, osl=300, rate=0.01))
    assert at_the_limit.total == pytest.approx((200_000 * 1.25 + 300 * 10) / 1e6)
    assert OPENAI.for_prompt(250_000) == OPENAI != OPENAI.for_prompt(300_000)
    assert ANTHROPIC.for_prompt(250_000) is None
    with pytest.raises(BadInput, match="not known"):
        request_cost(ANTHROPIC, usage)


def test_marked_prefix_costs_more_to_write_and_less_to_read() -> None:
    usage = ApiUsage(isl=6000, osl=1, rate=1.0, prefix=5000, hit_rate=0.75)
    found = request_cost(ANTHROPIC, usage)
    assert found.input == pytest.approx(1000 * 3 / 1e6)
    assert found.cached_read == pytest.approx(5000 * 0.75 * 0.3 / 1e6)
    assert found.cache_write == pytest.approx(5000 * 0.25 * 3.75 / 1e6)
    longer = ApiUsage(isl=6000, osl=1, rate=1.0, prefix=5000, hit_rate=0.75, long_lived=True)
    assert request_cost(ANTHROPIC, longer).cache_write == pytest.approx(5000 * 0.25 * 6 / 1e6)


def test_stored_prefix_is_charged_per_hour() -> None:
    usage = ApiUsage(isl=9000, osl=1, rate=0.01, prefix=8000, hit_rate=1.0, num_prefixes=3)
    found = request_cost(GEMINI, usage)
    assert found.storage == pytest.approx(3 * 8000 * 4.5 / 1e6 / 36)
    assert found.cached_read == pytest.approx(8000 * 0.125 / 1e6)


def test_short_prefix_is_not_cached() -> None:
    short = ApiUsage(isl=2000, osl=1, rate=1.0, prefix=1000, hit_rate=1.0)
    found = request_cost(OPENAI, short)
    assert not found.caches and found.cached_read == 0
    assert found.input == pytest.approx(2000 * 2.5 / 1e6)


def test_break_even_of_caching_follows_the_rules() -> None:
    assert break_even_reuses(ANTHROPIC) == 1 and break_even_reuses(ANTHROPIC, long_lived=True) == 2
    assert break_even_reads_per_hour(GEMINI) == pytest.approx(4.0)
    assert break_even_reads_per_hour(PRICES["gemini-2.5-flash"]) == pytest.approx(3.7, rel=0.01)


def test_stale_prices_are_rejected_or_reported() -> None:
    day = date(2026, 11, 21)
    assert check_fresh("x", "2026-06", day, accept_stale=False) is None
    with pytest.raises(BadInput, match="stale"):
        check_fresh("x", "2025-06", day, accept_stale=False)
    warning = check_fresh("x", "2025-06", day, accept_stale=True)
    assert warning is not None and "days old" in warning


def test_malformed_prices_are_rejected() -> None:
    row = '[[price]]\nname = "a"\nprovider = "b"\nrule = "automatic"\ninput = 1\noutput = 2\n'
    with pytest.raises(BadInput, match="malformed"):
        load_prices(row)
    with pytest.raises(BadInput, match="source"):
        load_prices(row + 'source = ""\nas_of = "2026-01-01"\n')
    with pytest.raises(BadInput, match="date"):
        load_prices(row + 'source = "s"\nas_of = "today"\n')
    with pytest.raises(BadInput, match="prefix"):
        ApiUsage(isl=5, osl=1, rate=1.0, prefix=6)


def test_owned_device_cost_by_hand() -> None:
    owned = OwnedDevice(dollars=35_040, years=4, watts=1000, dollars_per_kwh=0.1, pue=1.5)
    assert owned.dollars_per_hour == pytest.approx(1.0 + 0.15)
    assert SpotDevice(
        price=1.0, interruptions_per_hour=0.5, lost_s=720
    ).dollars_per_hour == pytest.approx(1 / 0.9)
    assert kwh_per_million(3.6) == pytest.approx(1.0)


def test_fleet_is_cheaper_beyond_the_break_even_rate() -> None:
    fleet = search(
        load_planning_spec("llama-3.1-8b"),
        Demand(rate=2, isl=1024, osl=256, isl_p95=1024, longest=1280),
        Slo.parse("ttft:1000 tpot:50"),
        SearchSpace(devices=("h100-sxm",), token_budgets=(2048,), max_devices_per_replica=1),
        load_catalogue(),
    ).fleets[0]
    even = break_even(fleet, 1.8, api_dollars=0.001)
    assert even.rate == pytest.approx(0.5) and even.share == pytest.approx(0.5 / fleet.rate)
    assert break_even(fleet, 1.8, api_dollars=1e-9).rate is None


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "cost",
        "llama-3.1-8b",
        "--accelerator",
        "h100-sxm",
        "--request-rate",
        "2",
        "--accept-stale",
    ]
    assert main([*asked, "--input-len", "6000", "--prefix-len", "5000", "--hit-rate", "0.9"]) == 0
    printed = capsys.readouterr().out
    assert "claude-sonnet-4.6" in printed and "1,000 requests take" in printed
    assert main([*asked, "--json", "--owned-dollars", "30000", "--watts", "1200"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert "owned" in output["basis"] and len(output["offers"]) == sum(
        row.model in ("", "llama-3.1-8b") for row in PRICES.values()
    )
    assert [o["total_per_request"] for o in output["offers"]] == sorted(
        o["total_per_request"] for o in output["offers"]
    )
    by = {each["name"]: each for each in output["terms"]}
    assert by["owned for 4 years, with power"]["per_month"] == output["dollars_per_month"]
    assert any("reserved-3y" in name for name in by), "a reserved price of the catalogue"
    spot = ["--spot-price", "0.5", "--spot-interruptions", "1", "--spot-lost-s", "360"]
    assert main([*asked, "--json", *spot]) == 0
    cheapest = json.loads(capsys.readouterr().out)["terms"][0]
    assert "spot" in cheapest["name"] and cheapest["per_device_hour"] == pytest.approx(0.5 / 0.9)
    assert main([*asked, *spot]) == 0 and "the same fleet" in capsys.readouterr().out
    own = tmp_path / "prices.toml"
    own.write_text(
        '[[price]]\nname = "old"\nprovider = "b"\nrule = "automatic"\ninput = 1\noutput = 2\n'
        'source = "s"\nas_of = "2020-01-01"\n'
    )
    assert main([*asked[:-1], "--price-per-hour", "2", "--prices", str(own)]) == 2
    assert "stale" in capsys.readouterr().err
    assert main([*asked, "--owned-dollars", "30000"]) == 2


@pytest.mark.parametrize(
    "flags",
    [
        ("--input-len", "0"),
        ("--prefix-len", "-1"),
        ("--input-len", "100", "--prefix-len", "101"),
        ("--num-prefixes", "0"),
        ("--hit-rate", "-inf"),
        ("--hit-rate", "nan"),
        ("--price-per-hour", "inf"),
        ("--watts", "1", "--owned-dollars", "nan"),
        ("--owned-dollars", "1", "--watts", "1", "--pue", "nan"),
        ("--spot-price", "1", "--spot-interruptions", "nan"),
    ],
)
def test_invalid_cost_inputs_are_rejected(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["cost", "llama-3.1-8b", "--accelerator", "h100-sxm", "--accept-stale", *flags]) == 2
    )
    assert flags[-1] in capsys.readouterr().err


def test_price_without_discount_has_no_break_even() -> None:
    plain = ApiPrice(
        name="p", provider="q", rule="automatic", input=1, output=1, source="s", as_of="2026-01"
    )
    with pytest.raises(BadInput):
        break_even_reuses(plain)
