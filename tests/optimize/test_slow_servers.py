"""Searches on servers that start slowly and answer in seconds: the budget holds few, small runs."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.config.settings import settings_from
from ridgeline.optimize.cost import MachinePrice
from ridgeline.optimize.job import OptimizeJob
from ridgeline.optimize.ladder import Ladder, load_default_ladder
from ridgeline.optimize.result import LadderResult
from ridgeline.optimize.search import optimize
from ridgeline.records import Slo
from tests.optimize.simulated_servers import Fake, Physics, Quirks

GOOD = {"model": "demo", "batching": "continuous", "max_num_seqs": 16}
FEW_SLOTS = Physics(
    fixed_s=0.07, per_seq_s=0.008, per_token_s=0.0015, prompt=64, shared=0, output=16
)
"""About vLLM's CPU build with a model of 135 million parameters on two cores."""


class NoisyServers(Fake):
    """Every configuration's speed varies by a tenth from run to run."""

    def quirks_of(self, settings: object) -> Quirks:
        return Quirks(noise=0.1)


async def search(draw: int, budget_s: float = 540.0, **baseline: Any) -> LadderResult:
    """The defaults against a baseline that starts in 30 s."""
    fake = NoisyServers(FEW_SLOTS, open_s=30.0)
    job = OptimizeJob(
        settings=settings_from({**GOOD, **baseline}),
        defaults=settings_from(GOOD),
        workload="equal requests",
        slo=Slo.parse("ttft:1500 tpot:150"),
        objective="goodput",
        budget_s=budget_s,
        price=MachinePrice(),
        seed=1000 * draw,
    )
    rungs = Ladder((), load_default_ladder().weights)
    result = await optimize(job, fake.environment(), rungs, clock=fake.clock)
    assert fake.clock.now_s <= budget_s
    return result


@pytest.mark.slow
async def test_too_few_slots_are_found_in_a_budget_of_a_few_dozen_runs() -> None:
    results = [await search(draw, max_num_seqs=2) for draw in range(20)]
    certain = [r for r in results if r.kept and r.total is not None and r.total.low > 1]
    assert len(certain) >= 17


@pytest.mark.slow
async def test_equal_servers_are_not_said_to_have_gained() -> None:
    """The same server under another seed: the closing comparison reverts what chance kept."""
    results = [await search(draw, seed=5) for draw in range(40)]
    gained = [r for r in results if r.kept and r.total is not None and r.total.low > 1]
    assert len(gained) <= 2
