"""An interrupted search continues where it ended: with its trials, incumbent, seeds and time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.errors import BadInput
from ridgeline.optimize import ladder
from ridgeline.optimize.result import LadderResult
from ridgeline.optimize.search import optimize
from ridgeline.optimize.search_state import STATE_FILE, SavedSearch, StateFile
from tests.optimize.simulated_servers import Fake, Physics, Quirks
from tests.optimize.test_search import job, only

RUNGS = only("continuous-batching", "prefix-caching", "token-budget", "int8")


async def search(
    fake: Fake, state: StateFile | None, rungs: ladder.Ladder = RUNGS, **changes: Any
) -> LadderResult:
    request = msgspec.structs.replace(job(900.0), **changes)
    return await optimize(request, fake.environment(), rungs, clock=fake.clock, state=state)


def verdicts(result: LadderResult) -> list[tuple[str, str, float | None]]:
    return [(t.label, t.verdict, None if t.ratio is None else t.ratio.mid) for t in result.trials]


@pytest.mark.slow
async def test_resumed_search_continues_exactly(tmp_path: Path) -> None:
    whole = await search(Fake(), None)
    first = Fake(interrupt_at_s=whole.trials[0].spent_s + 60.0)
    cut = await search(first, StateFile(tmp_path))
    assert cut.ended == "interrupted" and 0 < len(cut.trials) < len(whole.trials)
    rest = await search(Fake(), StateFile(tmp_path, resume=True))
    assert verdicts(rest) == verdicts(whole)
    assert rest.final.settings == whole.final.settings
    assert rest.total is not None and whole.total is not None
    assert rest.total.mid == pytest.approx(whole.total.mid, rel=0.2)


@pytest.mark.slow
async def test_time_already_spent_counts(tmp_path: Path) -> None:
    await search(Fake(), StateFile(tmp_path), only("continuous-batching"))
    saved = msgspec.json.decode((tmp_path / STATE_FILE).read_bytes(), type=SavedSearch)
    assert saved.budget.spent_s > 30
    again = Fake()
    result = await search(again, StateFile(tmp_path, resume=True), only("continuous-batching"))
    assert len(result.trials) == len(saved.trials)
    total_s = saved.budget.spent_s + again.clock.now_s
    assert result.provenance.spent_s == pytest.approx(total_s, rel=0.01)


@pytest.mark.slow
async def test_search_that_ran_out_of_time_says_how_it_continues(tmp_path: Path) -> None:
    fake = Fake()
    environment = fake.environment()
    steps = msgspec.structs.replace(environment.next_steps, folder=str(tmp_path))
    environment = msgspec.structs.replace(environment, next_steps=steps)
    short = msgspec.structs.replace(job(900.0), budget_s=90.0)
    first = await optimize(short, environment, RUNGS, clock=fake.clock, state=StateFile(tmp_path))
    assert first.ended == "budget spent" and first.trials
    assert any(f"--resume {tmp_path} --budget" in step for step in first.next_steps)
    rest = await search(Fake(), StateFile(tmp_path, resume=True))
    assert verdicts(rest)[: len(first.trials)] == verdicts(first)
    assert len(rest.trials) > len(first.trials)
    assert not any("--resume" in step for step in rest.next_steps)


@pytest.mark.slow
async def test_lossy_rungs_end_where_the_baselines_distributions_are_lost(tmp_path: Path) -> None:
    fake = Fake(physics=Physics(int8_speed=2.0))
    kept = await search(fake, StateFile(tmp_path), only("int8"))
    assert [trial.verdict for trial in kept.trials][:1] == ["kept"]
    rest = await search(fake, StateFile(tmp_path, resume=True), only("int8", "kv-int8"))
    reasons = {left.rung: left.reason for left in rest.not_tried}
    assert "resumed after a lossy rung" in reasons["kv-int8"]


async def test_interrupted_search_says_how_it_continues(tmp_path: Path) -> None:
    """Also before any trial has come to an end."""
    fake = Fake(interrupt_at_s=60.0)
    environment = fake.environment()
    steps = msgspec.structs.replace(environment.next_steps, folder=str(tmp_path))
    environment = msgspec.structs.replace(environment, next_steps=steps)
    cut = await optimize(
        job(900.0), environment, RUNGS, clock=fake.clock, state=StateFile(tmp_path)
    )
    assert cut.ended == "interrupted" and not cut.trials
    assert any(f"--resume {tmp_path} --budget 15m " in step for step in cut.next_steps)


async def test_nothing_to_resume_and_another_request_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no search to resume"):
        await search(Fake(), StateFile(tmp_path, resume=True))
    await search(Fake(), StateFile(tmp_path), only("static-batching"))
    with pytest.raises(BadInput, match="another workload"):
        await search(Fake(), StateFile(tmp_path, resume=True), workload="code")


def slots(count: int) -> ladder.Ladder:
    """One rung: continuous batching with this number of slots."""
    return ladder.parse_ladder(f"""
        [[rung]]
        id = "slots-{count}"
        title = "Slots"
        technique = "continuous-batching"
        changes = {{ batching = "continuous", max_num_seqs = {count} }}
        honesty = "exact"
        term = ""
        why = ""
        hurts_when = ""
        risk = 0
        complexity = 0
    """)


async def test_what_ran_out_of_memory_is_not_tried_larger_after_a_resume(tmp_path: Path) -> None:
    no_memory = {("batching", "continuous"): Quirks(open_error=MemoryError())}
    cut = await search(Fake(quirks=no_memory), StateFile(tmp_path), slots(8))
    assert [trial.verdict for trial in cut.trials] == ["crashed"]
    rest = await search(Fake(), StateFile(tmp_path, resume=True), slots(16))
    assert [trial.rung for trial in rest.trials] == ["slots-8"]
    reasons = {left.rung: left.reason for left in rest.not_tried}
    assert "as large as a trial that failed" in reasons["slots-16"]
    smaller = await search(Fake(), StateFile(tmp_path, resume=True), slots(4))
    assert smaller.trials[-1].rung == "slots-4" and smaller.trials[-1].verdict == "kept"
