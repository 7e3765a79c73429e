"""What a request costs on a fleet, with the failures and misses that are paid for."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

import ridgeline
from ridgeline.cli.render.planning.plan import print_plan
from ridgeline.plan.cost.request_bill import request_bill
from ridgeline.records import Slo
from ridgeline.workflows.planning.plan import PlanResult


@pytest.fixture(scope="module")
def planned() -> PlanResult:
    return ridgeline.plan(
        "llama-3.1-8b",
        accelerator="h100-sxm",
        quantization="bfloat16",
        kv_cache_dtype="bfloat16",
        price_per_hour=3.6,
        request_rate=2.0,
        max_devices=1,
    )


def test_failures_and_misses_are_paid_for(planned: PlanResult) -> None:
    fleet = planned.fleets[0]
    bill = request_bill(fleet, 2.0, Slo.parse("ttft:1000 error:10% attainment:90%"), 3.6)
    assert bill.per_request == pytest.approx(0.001 / 2)
    assert bill.success_share == pytest.approx(0.81)
    assert bill.per_success == pytest.approx(0.001 / 2 / 0.81)
    assert bill.device_hours_per_1000 == pytest.approx(fleet.num_devices * 500 / 3600)
    assert request_bill(fleet, 2.0, Slo.parse("ttft:1000"), None).per_success is None


def test_energy_is_the_design_power_over_the_tokens(planned: PlanResult) -> None:
    fleet, demand = planned.fleets[0], planned.demand
    assert fleet.watts is not None
    joules = fleet.watts / (demand.rate * demand.osl)
    assert planned.requests.kwh_per_million_output == pytest.approx(joules / 3.6)


def test_plan_prints_the_bill(planned: PlanResult) -> None:
    out = Console(file=StringIO(), width=200)
    print_plan(planned, out)
    assert isinstance(out.file, StringIO)
    printed = out.file.getvalue()
    assert "1,000 successful ones cost at most $" in printed
    assert "95% succeed within the SLO" in printed and "device hours" in printed
