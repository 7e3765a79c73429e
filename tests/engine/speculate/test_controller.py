"""The controller on a virtual clock: scripted step cost and acceptance, and what it makes of them.
Never slower than plain decoding by more than its allowance; near the best fixed depth where
drafting wins."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from ridgeline import Engine
from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.scheduler.speculation.base import DraftContext, DraftOutcome, StepCapacity
from ridgeline.engine.speculate.depth_control.acceptance_rate import AcceptanceRates
from ridgeline.engine.speculate.depth_control.controller import DepthController
from ridgeline.engine.speculate.depth_control.step_cost import DraftCost, StepTimeCurve
from ridgeline.engine.speculate.depth_control.step_timer import PlainStepTimer
from ridgeline.engine.speculate.depth_control.time_credit import TimeCredit
from ridgeline.engine.speculate.drafters.base import NO_GUESS, LookupGuess, kind_of
from ridgeline.records import Sampling

SAMPLING = Sampling()
RUNS = [Run(i, 0, (1,), (), None) for i in range(16)]
Seconds = Callable[[int, int], float]


def flat(runs: int, rows: int) -> float:
    """Bound by reading weights: rows are nearly free."""
    return 10e-3 + 0.05e-3 * rows


def steep(runs: int, rows: int) -> float:
    """Bound by arithmetic: every row costs what a sequence costs."""
    return 1e-3 + 1e-3 * rows


def stairs(runs: int, rows: int) -> float:
    """Three rows for the price of one, then the next stair."""
    return 5e-3 * -(-rows // 3)


class World:
    """Sequences that go on for ever, a drafter that is right with chance `alpha` per token."""

    name = "scripted"

    def __init__(
        self, seconds: Seconds, alpha: float, draft_s: float, batch: int, curve: Seconds
    ) -> None:
        self.now_s, self.rng = 0.0, random.Random(4)
        self.seconds, self.alpha, self.draft_s, self.batch = seconds, alpha, draft_s, batch
        self.controller = DepthController(self, 8, lambda: self.now_s)
        grid = {(b, b * d): curve(b, b * d) for b in (1, 2, 4, 8, 16, 32) for d in (1, 2, 3, 5, 9)}
        drafts = [(n, k, draft_s * k * (1 + n / 8)) for n in (1, 8) for k in (1, 4)]
        self.controller.calibrate(StepTimeCurve(grid), DraftCost(drafts))
        self.num_tokens = 0

    def draft(
        self, contexts: Sequence[DraftContext], depths: Sequence[int]
    ) -> list[tuple[int, ...]]:
        self.now_s += self.draft_s * max(depths) * (1 + len(contexts) / 8)
        return [(1,) * depth for depth in depths]

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        pass

    def contexts(self) -> list[DraftContext]:
        return [DraftContext(i, (), 1, "", SAMPLING, 0, 8) for i in range(self.batch)]

    def step(self, depth: int | None = None) -> None:
        """One step, by the controller or at a fixed depth; noise of 5 % on its time."""
        contexts = self.contexts()
        if depth is None and not self.controller.should_propose(RUNS[: self.batch]):
            drafts: list[tuple[int, ...]] = [()] * self.batch
        elif depth is None:
            drafts = self.controller.propose(contexts, StepCapacity(self.batch, self.batch, 500))
        else:
            drafts = self.draft(contexts, [depth] * self.batch)
        rows = self.batch + sum(map(len, drafts))
        self.now_s += self.seconds(self.batch, rows) * self.rng.uniform(0.95, 1.05)
        outcomes = [self._verdict(i, len(draft)) for i, draft in enumerate(drafts) if draft]
        self.num_tokens += self.batch + sum(v.num_accepted for v in outcomes)
        if depth is None:
            self.controller.observe(outcomes)

    def _verdict(self, seq_id: int, num_drafted: int) -> DraftOutcome:
        kept = 0
        while kept < num_drafted and self.rng.random() < self.alpha:
            kept += 1
        return DraftOutcome(seq_id, num_drafted, kept)


def rate(world: World, depth: int | None, steps: int = 600) -> float:
    for _ in range(steps):
        world.step(depth)
    return world.num_tokens / world.now_s


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [flat, steep, stairs])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("draft_s", [0.0, 1e-3])
def test_controller_never_loses_and_finds_a_good_depth(
    seconds: Seconds, alpha: float, batch: int, draft_s: float
) -> None:
    made = [World(seconds, alpha, draft_s, batch, seconds) for _ in range(7)]
    plain, chosen = rate(made[0], 0), rate(made[1], None)
    best = max(rate(world, depth) for world, depth in zip(made[2:], (1, 2, 3, 5, 8), strict=True))
    assert chosen >= 0.98 * plain
    assert chosen >= 0.85 * best, "drafting wins here, and it was not found"


@pytest.mark.parametrize("batch", [1, 16])
def test_controller_does_not_lose_with_a_wrong_curve(batch: int) -> None:
    """Measured flat, in truth steep: the credit stops drafting in spite of the prediction."""
    plain = rate(World(steep, 0.4, 0.0, batch, flat), 0)
    assert rate(World(steep, 0.4, 0.0, batch, flat), None) >= 0.97 * plain


def test_drafting_resumes_when_acceptance_improves() -> None:
    """Nothing is accepted for a long time, then nearly everything."""
    world = World(flat, 0.0, 0.0, 4, flat)
    for _ in range(1500):
        world.step()
    world.alpha, before, began_s = 0.95, world.num_tokens, world.now_s
    for _ in range(800):
        world.step()
    plain = 4 / flat(4, 4)
    assert (world.num_tokens - before) / (world.now_s - began_s) > 2 * plain


class Reading(World):
    """Texts of 300 tokens, which the drafter reads (2 ms each) before it drafts for them."""

    def __init__(self, alpha: float) -> None:
        super().__init__(flat, alpha, 1e-4, 8, flat)
        self.read = set[int]()
        self.most_read = 0

    def draft(
        self, contexts: Sequence[DraftContext], depths: Sequence[int]
    ) -> list[tuple[int, ...]]:
        new = {context.seq_id for context, d in zip(contexts, depths, strict=True) if d} - self.read
        self.most_read = max(self.most_read, len(new))
        self.read |= new
        self.now_s += 2e-3 * len(new)
        return super().draft(contexts, depths)

    def contexts(self) -> list[DraftContext]:
        return [replace(context, tokens=(1,) * 300) for context in super().contexts()]


@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_drafter_reads_one_sequence_at_a_time(alpha: float) -> None:
    world = Reading(alpha)
    for _ in range(300):
        world.step()
    assert world.most_read == 1
    if alpha:
        assert len(world.read) == 8, "all of them where it pays"
        assert world.num_tokens / world.now_s > 1.5 * 8 / flat(8, 8)


@pytest.mark.parametrize("batch", [1, 8])
def test_cold_caches_after_drafts_do_not_make_plain_steps_look_slow(batch: int) -> None:
    """A plain step behind one with drafts takes half as long again."""
    last = [batch]

    def cold(runs: int, rows: int) -> float:
        before, last[0] = last[0], rows
        return flat(runs, rows) * (1.5 if rows == runs < before else 1.0)

    world = World(cold, 0.9, 0.0, batch, flat)
    for _ in range(600):
        world.step()
    assert world.num_tokens > 600 * batch * 2, "drafts are taken"
    believed = world.controller.costs.step.seconds(batch, batch)
    assert believed == pytest.approx(flat(batch, batch), rel=0.06)


def test_second_plain_step_is_learned_from_while_prompts_arrive() -> None:
    """Otherwise no decode step would be drafted for as long as prompts keep arriving."""
    now_s, cost = 0.0, StepTimeCurve({(2, 2): 1.0})
    pace, learnt = PlainStepTimer(lambda: now_s), []
    for took_s in (5.0, 1.2):
        pace.mark_decision()  # in a step with a prompt and drafts
        pace.begin(RUNS[:2])
        pace.request_learning()
        now_s += took_s
        learnt.append(pace.end_undecided_step(cost)[0])
    assert learnt == [False, True]
    assert 1.0 < cost.seconds(2, 2) < 1.3


def test_losses_of_the_drafter_do_not_reduce_lookups() -> None:
    account = TimeCredit(both=True)
    account.add_drafts(account.looked, 5e-3, 5e-3, 10e-3, 10e-3)
    gain = account.recent_gain
    account.add_drafts(account.computed, -80e-3, 5e-3, 90e-3, 10e-3)
    assert account.recent_gain == gain > 0
    account.add_steps(1000)
    assert account.recent_gain < gain / 100


@pytest.mark.slow
def test_engine_measures_its_curve_and_keeps_its_tokens() -> None:
    """The real parts: calibrated at the start, and the tokens are those of plain decoding."""
    greedy = Sampling(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = ["for name in names:\n    print(name)\nfor name in names:\n", "import os\n"]
    options = {"num_threads": 1, "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 2}
    with Engine.open("demo", **options) as plain:
        expected = [each.tokens for each in plain.generate(prompts, greedy)]
    with Engine.open("demo", speculative_config={"method": "ngram"}, **options) as engine:
        drafts = engine._loop.scheduler.draft_scheduler._proposer
        assert isinstance(drafts, DepthController) and 0 < drafts.costs.step.seconds(2, 2) < 1.0
        assert [each.tokens for each in engine.generate(prompts, greedy)] == expected


def test_nothing_is_drafted_before_calibration() -> None:
    world = World(flat, 0.9, 0.0, 2, flat)
    world.controller = DepthController(world, 4, lambda: world.now_s)
    contexts = [DraftContext(0, (), 1, "", SAMPLING, 0, 8)]
    assert not any(world.controller.should_propose(RUNS[:2]) for _ in range(99))
    assert world.controller.propose(contexts, StepCapacity(1, 1, 9)) == [()]


def test_acceptance_is_learned_per_position_and_sequence() -> None:
    acceptance, rng = AcceptanceRates(), random.Random(1)
    for _ in range(400):
        acceptance.learn(0, 2, 2 if rng.random() < 0.5 else 1)
        acceptance.learn(1, 2, 0)
    rates = acceptance.rates(2)
    assert 0.4 < rates[0] < 0.6, "half of all first tokens"
    assert 0.3 < rates[1] < 0.7, "half of the second ones, where the first was accepted"
    easy, hard = acceptance.survivals(0, rates), acceptance.survivals(1, rates)
    assert easy[0] > 0.8 and 0.3 < easy[1] < 0.7 and hard[0] < 0.3
    for _ in range(400):
        acceptance.idle(1)
    assert acceptance.survivals(1, rates)[0] == pytest.approx(rates[0], abs=0.01)
    acceptance.forget(1)
    assert acceptance.survivals(1, rates) == pytest.approx([rates[0], rates[0] * rates[1]])


def test_cost_curve_follows_measured_steps() -> None:
    cost = StepTimeCurve({(1, 1): 1.0, (1, 2): 2.0, (1, 4): 2.0, (4, 4): 4.0, (4, 8): 6.0})
    assert cost.seconds(1, 1) == 1.0 and cost.seconds(1, 3) == 2.0
    assert cost.seconds(2, 4) == pytest.approx(2.0 + 2.0 / 3)
    assert cost.seconds(1, 8) == 2.0 and cost.seconds(4, 12) == 8.0
    for _ in range(200):
        cost.learn(1, 1, 3.0)
    assert cost.seconds(1, 1) == pytest.approx(3.0, rel=0.01)
    assert cost.seconds(4, 4) > 4.2, "everything plain got slower, by a little"
    assert 2.0 < cost.seconds(1, 2) < 2.3, "of steps with drafts: that the machine got slower"
    before = cost.seconds(1, 1)
    cost.learn(1, 1, 1000.0)
    assert cost.seconds(1, 1) == before, "an outlier says nothing"
    assert cost.line(1, 2, 4) == pytest.approx([cost.seconds(1, r) for r in range(2, 6)])


class Bursts:
    """One sequence on a virtual clock: of every `NEW` + `COPIED` tokens the latter can be looked
    up; each decision costs `decision_s`."""

    NEW, COPIED = 8, 16

    name = "bursts"

    def __init__(self, curve: Seconds, decision_s: float) -> None:
        self.now_s, self.num_known, self.decision_s = 0.0, 1, decision_s
        self.controller = DepthController(None, 16, lambda: self.now_s, self)
        grid = {(1, 1 + depth): curve(1, 1 + depth) for depth in (0, 1, 2, 4, 8, 16)}
        self.controller.calibrate(StepTimeCurve(grid))

    def look(self, context: DraftContext, most: int) -> LookupGuess:
        self.now_s += self.decision_s
        place = len(context.tokens) % (self.NEW + self.COPIED)
        if place < self.NEW:
            return NO_GUESS
        num = min(most, self.NEW + self.COPIED - place)
        return LookupGuess((1,) * num, (kind_of(8),) * num)

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        pass

    def cold_s(self) -> float:
        """Seconds by which the decision slows down the current step."""
        return 0.0

    def step(self) -> None:
        tokens = (1,) * self.num_known
        drafts: list[tuple[int, ...]] = [()]
        if self.controller.should_propose(RUNS[:1]):
            contexts = [DraftContext(0, tokens, 1, "", SAMPLING, 0, 16)]
            drafts = self.controller.propose(contexts, StepCapacity(1, 1, 99))
        num, right = len(drafts[0]), sum(drafts[0])
        self.now_s += flat(1, 1 + num) + self.cold_s()
        self.num_known += 1 + right
        self.controller.observe([DraftOutcome(0, num, right)] if num else [])


@pytest.mark.parametrize(
    ("curve", "decision_s"), [(flat, 600e-6), (lambda runs, rows: 10e-3 * rows, 300e-6)]
)
def test_short_copyable_bursts_are_used(curve: Seconds, decision_s: float) -> None:
    """Short bursts do not start with a plain step, and decisions are not postponed too long (what
    drafts save pays for decisions, `DECISION_SHARE_OF_GAIN`: without it 0.56 of the ideal); nor
    does a curve stay steep for ever after a disturbed start.
    """
    world = Bursts(curve, decision_s)
    for _ in range(800):
        world.step()
    num_steps = world.NEW + 1
    ideal = (world.NEW + world.COPIED) / (num_steps * flat(1, 1))
    assert world.num_known / world.now_s > 0.75 * ideal


class Cold(Bursts):
    """Nothing can be looked up. A decision evicts data that this step and the next need from the
    caches; timing the decision alone does not show it."""

    num_cold = 0

    def look(self, context: DraftContext, most: int) -> LookupGuess:
        self.now_s += self.decision_s
        self.num_cold = 2
        return NO_GUESS

    def cold_s(self) -> float:
        self.num_cold -= 1
        return 1e-3 if self.num_cold >= 0 else 0.0


def test_cache_misses_after_a_decision_count_as_its_cost() -> None:
    """By the timer alone there would be a decision in every third step, at a loss of 7 %."""
    world = Cold(flat, 0.1e-3)
    for _ in range(3000):
        world.step()
    assert world.now_s < 1.012 * 3000 * flat(1, 1)
    assert 1.5e-3 < world.controller._timer.decision_s < 3e-3
    assert world.controller.costs.step.seconds(1, 1) == pytest.approx(flat(1, 1), rel=0.01)


class Dear(Bursts):
    """Nothing can be looked up, and to remember an answer takes two plain steps."""

    def look(self, context: DraftContext, most: int) -> LookupGuess:
        self.now_s += self.decision_s
        return NO_GUESS

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self.now_s += 2 * flat(1, 1) if tokens else 0.0


def test_unaffordable_answers_are_not_remembered() -> None:
    """Sixty answers: all of them would take 4 % of the time."""
    world = Dear(flat, 0.1e-3)
    for i in range(3000):
        world.step()
        if i % 50 == 49:
            world.controller.forget(0, (1,) * 50, "")
    assert world.now_s < 1.012 * 3000 * flat(1, 1)


class Disturbed(Bursts):
    """Another process runs for a second during one step with drafts."""

    is_over = False

    def cold_s(self) -> float:
        step = self.controller._current_step
        if self.is_over or step is None or not step.looked_up or self.num_known < 1000:
            return 0.0
        self.is_over = True
        return 1.0


def test_one_disturbed_step_does_not_end_drafting() -> None:
    """Booked as it was, it would be a hundred plain steps lost, to be earned by rare tries."""
    world = Disturbed(flat, 100e-6)
    while not world.is_over:
        world.step()
    num_known, now_s = world.num_known, world.now_s
    for _ in range(100):
        world.step()
    ideal = (world.NEW + world.COPIED) / ((world.NEW + 1) * flat(1, 1))
    assert (world.num_known - num_known) / (world.now_s - now_s) > 0.75 * ideal


class Wrong:
    """A drafter that takes a plain step's time for every token and is never right."""

    name = "wrong"

    def __init__(self, world: Bursts) -> None:
        self._world = world

    def draft(
        self, contexts: Sequence[DraftContext], depths: Sequence[int]
    ) -> list[tuple[int, ...]]:
        self._world.now_s += max(depths) * flat(1, 1)
        return [(0,) * depth for depth in depths]

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        pass


def test_wrong_drafter_does_not_use_the_credit_of_lookups() -> None:
    """A drafter that is claimed to be cheap is tried and loses its own credit, not the lookup's."""
    alone, with_drafter = Bursts(steeper, 300e-6), Bursts(steeper, 300e-6)
    costs = with_drafter.controller.costs.step
    drafts = [(n, k, 0.1e-3 * n * k) for n in (1, 8) for k in (1, 4)]
    clock = lambda: with_drafter.now_s  # noqa: E731
    with_drafter.controller = DepthController(Wrong(with_drafter), 16, clock, with_drafter)
    with_drafter.controller.calibrate(costs, DraftCost(drafts))
    for world in (alone, with_drafter):
        for _ in range(800):
            world.step()
    assert with_drafter.num_known / with_drafter.now_s > 0.9 * alone.num_known / alone.now_s


def steeper(runs: int, rows: int) -> float:
    """What is looked up seems hardly worth its rows at first."""
    return 10e-3 * (0.4 + 0.6 * rows)


def test_drafts_slower_than_predicted_do_not_make_plain_steps_look_slow() -> None:
    cost = StepTimeCurve({(1, rows): 1.0 for rows in range(1, 20)})
    for rows in range(2, 20):
        for _ in range(20):
            cost.learn(1, rows, 2.0)
    assert cost.seconds(1, 1) == 1.0 and cost.seconds(1, 5) > 1.8


def test_account_follows_the_clock_that_is_set() -> None:
    """Wall time of a busy machine runs faster than the processor time that is set: none of it may
    remain in the account."""
    world = World(flat, 0.8, 0.0, 1, flat)
    costs = world.controller.costs
    world.controller = DepthController(world, 8, lambda: 2 * world.now_s)
    world.controller.calibrate(costs.step, costs.draft)
    world.controller.use_clock(lambda: world.now_s)
    assert not world.controller.should_propose(RUNS[:1]), "costs by the earlier clock are dropped"
    world.controller.calibrate(costs.step, costs.draft)
    rate(world, None)
    saved_s = world.num_tokens * flat(1, 1) - world.now_s
    account = world.controller.account
    assert account.saved_s - account.lost_s == pytest.approx(saved_s, rel=0.15)
