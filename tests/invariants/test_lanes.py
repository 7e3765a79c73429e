"""Background requests do not change the interactive runs of any step.

The same interactive requests are served twice, on their own and mixed with background requests.
Without a prefix cache (which both would share), every step must have the same interactive runs:
the same sequences, start positions and lengths. That preempted sequences get the right answers is
tested in test_scheduler.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import pytest

from ridgeline.engine.scheduler.admission import admitter
from ridgeline.engine.scheduler.admission.admitter import Admitter
from ridgeline.engine.scheduler.plan import StepPlan
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.engine.scheduler.token_budget import ChunkedBudget, WholeBudget
from ridgeline.records import Request
from tests.engine.scheduler.helpers import make_request, scheduler, scripted

Runs = list[tuple[str, int, int, int]]
Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Load:
    """Arrivals and cancellations, each with the step it precedes."""

    setup: dict[str, object]
    arrivals: list[tuple[int, Request]]
    cancels: list[tuple[int, str]]


def random_load(rng: random.Random) -> Load:
    num_blocks, block_size = rng.randint(6, 14), rng.choice((1, 2, 4))
    setup = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_seqs": rng.randint(1, 5),
        "max_num_batched_tokens": rng.randint(2, 12),
        "chunked_prefill": rng.random() < 0.7,
        "policy": rng.choice(("static", "dynamic", "continuous", "continuous")),
        "wait_s": 2.0,
        "aging_s": 5.0,
        "background_tokens": rng.choice((None, *range(7))),
        "eos": (),
    }
    arrivals = []
    for i in range(rng.randint(6, 16)):
        num_prompt = rng.randint(1, min(num_blocks * block_size - 1, 12))
        room = num_blocks * block_size - num_prompt
        made = make_request(
            f"{i}",
            num_prompt,
            first=rng.choice((100, 100, 300)),
            max_tokens=rng.randint(1, min(room, 10)),
            n=rng.choice((1, 1, 1, 2, 3)),
            priority=rng.randint(-1, 1),
            background=rng.random() < 0.5,
        )
        arrivals.append((rng.randint(0, 25), made))
    ids = [made.id for _, made in arrivals]
    cancels = [(rng.randint(1, 30), rng.choice(ids)) for _ in range(rng.randint(0, 3))]
    return Load(setup, sorted(arrivals, key=lambda pair: (pair[0], pair[1].id)), cancels)


def serve(load: Load, *, alone: bool) -> list[Runs]:
    """The interactive runs of every step."""
    sched = scheduler(**load.setup)
    interactive = {made.id for _, made in load.arrivals if not made.background}
    steps: list[Runs] = []
    for now in range(2000):
        for at, made in load.arrivals:
            if at == now and not (alone and made.background):
                sched.add(msgspec.structs.replace(made, arrival_s=float(now)))
        for at, request_id in load.cancels:
            if at == now:
                sched.cancel(request_id, float(now))
        plan = sched.plan(float(now))
        steps.append([run for run in _runs(sched, plan) if run[0] in interactive])
        sched.commit(plan, scripted(plan), now + 0.5)
        if now > 30 and not sched.has_work:
            break
    assert not sched.has_work and sched.pool.num_owned == 0
    return steps


def _runs(sched: Scheduler, plan: StepPlan) -> Iterator[tuple[str, int, int, int]]:
    for run in plan.runs:
        seq = sched._registry.find_running(run.seq_id)
        assert seq is not None
        yield seq.request.id, seq.index, run.start, len(run.tokens)


def count_differing(seeds: range) -> int:
    """How many of these random loads are planned differently with background requests."""
    count = 0
    for seed in seeds:
        load = random_load(random.Random(seed))
        alone, mixed = serve(load, alone=True), serve(load, alone=False)
        last = max((i for i, runs in enumerate(alone) if runs), default=0)
        count += alone[: last + 1] != mixed[: last + 1] or any(mixed[last + 1 :])
    return count


@pytest.mark.slow
def test_background_requests_change_no_interactive_step() -> None:
    assert count_differing(range(300)) == 0


def keep_the_slot(patch: pytest.MonkeyPatch) -> None:
    def candidate(self: Admitter, lane: object, step: object) -> object:
        full = len(self._registry.running) >= self._limits.max_num_seqs
        return None if full else original(self, lane, step)

    original = Admitter._candidate
    patch.setattr(Admitter, "_candidate", candidate)


def keep_the_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admitter, "_num_preemptible", lambda self, prefix, lane: 0)


def background_first(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._plan_lane
    patch.setattr(
        Scheduler,
        "_plan_lane",
        lambda self, lane, step: original(self, self._registry.lanes[1 - lane.rank], step),
    )


def count_all_lanes(patch: pytest.MonkeyPatch) -> None:
    def view(self: Admitter, lane: object, step: object, num_tokens: int = 0) -> object:
        return original(self, self._registry.lanes[-1], step, num_tokens)

    original = Admitter._queue_view
    patch.setattr(admitter.Admitter, "_queue_view", view)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant", [keep_the_slot, keep_the_blocks, background_first, count_all_lanes]
)
def test_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    try:
        found = count_differing(range(60))
    except AssertionError:
        return  # the load is not served to its end
    assert found > 0


# -- single rules


def run(sched: Scheduler, now_s: float = 0.0) -> Runs:
    plan = sched.plan(now_s)
    found = list(_runs(sched, plan))
    sched.commit(plan, scripted(plan), now_s)
    return found


def test_background_sequence_yields_its_slot_at_once_and_resumes() -> None:
    sched = scheduler(max_num_seqs=2, num_blocks=32, background_tokens=16)
    for name in ("x", "y"):
        sched.add(make_request(name, 3, background=True, max_tokens=8, priority=-9))
    assert [each[0] for each in run(sched)] == ["x", "y"]
    sched.add(make_request("a", 3, at_s=1.0, max_tokens=2, priority=9))
    assert [each[0] for each in run(sched, 1.0)] == ["a", "x"]
    assert sched.totals.num_preempted == 1
    assert [each[0] for each in run(sched, 2.0)] == ["a", "x"]
    assert run(sched, 3.0) == [("x", 0, 5, 1), ("y", 0, 0, 4)], "known tokens of y are kept"


def test_background_blocks_are_taken_only_if_they_suffice() -> None:
    sched = scheduler(num_blocks=8, block_size=4, background_tokens=16)
    sched.add(make_request("a", 12, max_tokens=12))
    sched.add(make_request("x", 8, background=True, max_tokens=4))
    run(sched)
    sched.add(make_request("b", 20, at_s=1.0, max_tokens=4))
    assert [each[0] for each in run(sched, 1.0)] == ["a", "x"], "b would not fit even without x"
    sched.cancel("b")
    sched.add(make_request("c", 8, at_s=2.0, max_tokens=4))
    assert [each[0] for each in run(sched, 2.0)] == ["a", "c"]


def test_mixed_steps_carry_limited_background_tokens() -> None:
    sched = scheduler(num_blocks=64, max_num_batched_tokens=40, background_tokens=5)
    sched.add(make_request("x", 30, background=True))
    sched.add(make_request("a", 4))
    assert [each[3] for each in run(sched)] == [4, 5]
    assert [each[3] for each in run(sched, 1.0)] == [1, 5]
    sched.cancel("a")
    assert [each[3] for each in run(sched, 2.0)] == [20], "on its own it may use the whole step"


def test_background_requests_preempt_nothing() -> None:
    sched = scheduler(max_num_seqs=1, num_blocks=8, block_size=4)
    sched.add(make_request("a", 8, max_tokens=8))
    run(sched)
    sched.add(make_request("x", 4, background=True, priority=-100))
    assert [each[0] for each in run(sched, 1.0)] == ["a"]
    assert sched.totals.num_preempted == 0


@pytest.mark.parametrize("budget", [ChunkedBudget(8), WholeBudget(8)])
def test_limit_applies_to_whole_prompts(budget: ChunkedBudget | WholeBudget) -> None:
    budget.limit(3)
    assert budget.left == 3
    budget.limit(5)
    assert budget.left == 3
