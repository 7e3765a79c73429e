"""Chooses how deep to draft for each sequence in this step: as deep as pays, from measured costs.

Lookups are made first, since they cost microseconds. Every token that could be drafted, looked up
or yet to be computed, has an acceptance probability (`LookupAccuracy`, `AcceptanceRates`) and
lengthens the step as measured (`StepTimeCurve`). The tokens are chosen that maximise the batch's
tokens per second (`DepthPlan`). If the gain over a plain step is not clear, nothing is drafted.

Bounded loss. The predicted gain must exceed a margin (half of it while drafting: hysteresis), and a
credit in seconds is kept (`TimeCredit`). Every step adds a small share of its time; a step with
drafts adds what plain decoding would have taken for the same tokens minus what it took (next to
prompts, by the curve). Drafting, and probing while drafting does not pay, require credit. Without
credit, a predicted gain may be tried once in `PROBE_STEPS` steps, and half as often after every
loss; lookups and computed drafts have separate credits. So whatever the predictions are worth, the
loss is bounded by that share plus the credit's ceiling of a few steps. A plain step after at most
`PLAIN_STEPS` steps with drafts keeps the baseline current. The accuracy of lookups needs no probes,
since unverified guesses are compared with plain decoding, but the cost of their rows is probed
occasionally where they are likely right. While nothing is drafted, the decision itself is made
rarely enough to take less than `DECISION_SHARE` of the time, including reading new prompts and
remembering responses; after recent gains a part of them is spent on deciding more often, because
copyable passages start and end within a few steps.

Source: SmartSpec / TurboSpec (Liu et al. 2024, arXiv 2406.14066): goodput as the objective; a
measured curve instead of a roofline, because kernel times are staircases.

Invariant: depth changes no token of greedy or seeded requests and no distribution of others. When
it loses: deciding takes 0.05 ms of a step with one sequence whose weights evict it from the caches,
0.1 ms with eight, and more with a draft model; it is done rarely while useless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.scheduler.speculation.base import DraftContext, DraftOutcome, StepCapacity
from ridgeline.engine.speculate.depth_control.acceptance_rate import AcceptanceRates
from ridgeline.engine.speculate.depth_control.lookup_accuracy import LookupAccuracy
from ridgeline.engine.speculate.depth_control.plan import (
    DepthPlan,
    DraftingCosts,
    best_plan,
    plain_plan,
)
from ridgeline.engine.speculate.depth_control.step_cost import DraftCost, StepTimeCurve
from ridgeline.engine.speculate.depth_control.step_timer import PlainStepTimer, is_decode
from ridgeline.engine.speculate.depth_control.time_credit import CreditBalance, TimeCredit
from ridgeline.engine.speculate.drafters.base import NO_GUESS, Drafter, Lookup, LookupGuess
from ridgeline.engine.speculate.drafters.combined import Combined

MARGIN = 0.03
PLAIN_STEPS = 40
FIRST_PLAIN = 3  # steps with drafts before the first plain one; twice as many before each next
DECISION_SHARE, MAX_REST = 0.005, 256
INITIAL_BUDGET, MAX_BUDGET = 4.0, 8.0  # decision budget, in plain steps
DECISION_SHARE_OF_GAIN = 0.2  # share of the recent gain that may be spent on decisions
PROBE_DEPTH = 2
LIKELY = 0.7  # probability above which a lookup is drafted only to measure its cost
MAX_SLOWDOWN = 4.0  # times the expected or a plain step: longer steps were disturbed by other work
MAX_UNREAD = 16  # unread tokens that the drafter's cost per draft still covers


class DraftingStep:
    """The decision for the current step, and when it was made."""

    __slots__ = (
        "computed_s",
        "deepest",
        "drafted_s",
        "is_try",
        "looked_up",
        "must_read",
        "num_computed",
        "plan",
        "room",
    )

    def __init__(self, room: StepCapacity, plan: DepthPlan) -> None:
        self.room, self.plan = room, plan
        self.looked_up = set[int]()  # sequences whose draft was looked up
        self.num_computed = self.deepest = 0
        self.computed_s = self.drafted_s = 0.0
        self.is_try = False  # a probe, or drafted without credit
        self.must_read = False  # the drafter had much to read first


def _nothing() -> None:
    pass


class DepthController:
    """Chooses depths from measured costs.

    `drafter` computes drafts, if there is one; `max_drafts` bounds drafts per sequence and step;
    `lookup` goes first; `renew` runs before every step that may draft without the drafter.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        most: int,
        clock: Callable[[], float],
        lookup: Lookup | None = None,
        renew: Callable[[], None] = _nothing,
    ) -> None:
        assert drafter is not None or lookup is not None
        self.acceptance, self.shadows = AcceptanceRates(), LookupAccuracy()
        self.account = TimeCredit(both=drafter is not None and lookup is not None)
        self._drafter, self._lookup = drafter, lookup
        self.max_drafts, self._clock, self._renew = most, clock, renew
        self._costs: DraftingCosts | None = None
        self._current_step: DraftingStep | None = None
        self._drafting, self._since_plain, self._until_plain = False, 0, FIRST_PLAIN
        self._since_decision, self._rest = 0, 1
        self._decision_budget = INITIAL_BUDGET  # plain steps for deciding and remembering
        self._plain_s = 0.0  # seconds of a plain step in the latest plan
        self._timer = PlainStepTimer(clock)
        self._drafted: CreditBalance | None = None  # balance of the drafts in the latest decision
        self._read: dict[int, int] = {}  # by sequence: known tokens at its last computed draft

    def calibrate(self, step_cost: StepTimeCurve, draft_cost: DraftCost | None = None) -> None:
        """Set the measured costs; nothing is drafted before. `draft_cost`: of the drafter, if there
        is one.
        """
        self._costs = DraftingCosts(step_cost, draft_cost)

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Decide and account by another clock, such as processor time, from the next step on.

        Costs that were measured by the earlier clock are dropped: calibrate again.
        """
        self._clock, self._timer, self._costs = clock, PlainStepTimer(clock), None

    @property
    def costs(self) -> DraftingCosts:
        """Current costs of steps and drafts; valid after `calibrate`."""
        assert self._costs is not None
        return self._costs

    @property
    def drafter(self) -> Drafter:
        """Lookup and drafter as one, for a proposer that decides depths by itself."""
        if self._lookup is None and self._drafter is not None:
            return self._drafter
        return Combined(self._lookup, self._drafter)

    # -- the scheduler's side

    def should_propose(self, runs: Sequence[Run]) -> bool:
        """While nothing is drafted, decide only every few steps."""
        self._since_decision += 1
        if self._costs is None:
            return False
        self._timer.begin(runs)
        if not (self._drafting or self._since_decision >= self._rest):
            return False
        if not self._should_be_plain(runs, self._costs.step):
            return True
        self._timer.request_learning()
        return False

    def propose(
        self, contexts: Sequence[DraftContext], room: StepCapacity
    ) -> list[tuple[int, ...]]:
        if self._costs is None or not contexts:
            return [()] * len(contexts)
        self._timer.mark_decision()
        self.account.add_steps(self._since_decision)
        self._decision_budget += self._since_decision * self._decision_share()
        self._decision_budget = min(MAX_BUDGET, self._decision_budget)
        self._since_decision = 0
        guesses = [self._look(context) for context in contexts]
        plan, computed = self._decide(contexts, guesses, room)
        step = self._current_step = DraftingStep(room, plan)
        step.is_try = not self._drafting
        drafts = self._proposer(contexts, guesses, computed, step)
        step.drafted_s = self._clock()
        if not step.looked_up and not step.deepest:
            self._idle(contexts, step)
        return drafts

    def alternatives(self, seq_id: int) -> Sequence[tuple[int, ...]]:
        return ()

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        step, self._current_step = self._current_step, None
        if step is None:
            self._end_undecided_step()
            return
        for outcome in outcomes:
            if outcome.seq_id not in step.looked_up:
                self.acceptance.learn(outcome.seq_id, outcome.num_drafted, outcome.num_accepted)
        if self._costs is not None:
            self._settle(step, outcomes, self._costs)

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self.acceptance.forget(seq_id)
        self.shadows.forget(seq_id)
        self._read.pop(seq_id, None)
        begun_s = self._clock()
        if self._lookup is not None:
            remembered = tokens if self._decision_budget > 0 else ()
            self._lookup.forget(seq_id, remembered, tenant)
        if self._drafter is not None:
            self._drafter.forget(seq_id, tokens, tenant)
        self._spend(self._clock() - begun_s)

    def counters(self) -> dict[str, float]:
        return self.account.as_dict()

    # -- deciding

    def _look(self, context: DraftContext) -> LookupGuess:
        """Look up guesses, and judge the previous ones on the way."""
        if self._lookup is None:
            return NO_GUESS
        self.shadows.compare(context.seq_id, context.tokens)
        guess = self._lookup.look(context, min(context.max_drafts, self.max_drafts))
        self.shadows.keep(context, guess)
        return guess

    def _decide(
        self, contexts: Sequence[DraftContext], guesses: Sequence[LookupGuess], room: StepCapacity
    ) -> tuple[DepthPlan, list[bool]]:
        """The plan, and whose drafts to compute. All depths are 0 if no gain is clear."""
        assert self._costs is not None
        costs = self._costs
        none, plain = [False] * len(contexts), plain_plan(len(contexts), room, costs)
        looked = [
            self.shadows.survivals(context.seq_id, guess) if guess.tokens else []
            for context, guess in zip(contexts, guesses, strict=True)
        ]
        if self._drafter is None and not any(looked):
            self._drafting = False
            return plain, none
        best, computed, chances = best_plan(looked, none, room, costs), none, looked
        enough = plain.rate * (1 + (MARGIN / 2 if self._drafting else MARGIN))
        if self._drafter is not None and (best.rate <= enough or self.account.computed.credit > 0):
            mixed, which = self._with_computed(contexts, looked)
            other = best_plan(mixed, which, room, costs)
            if other.rate > best.rate:
                best, computed, chances = other, which, mixed
        balance, pays = self.account.balance(any(computed)), best.rate > enough
        self._drafting = pays and balance.credit > 0
        if self._drafting or (pays and balance.may_try()):
            return self._read_one(contexts, best, computed, chances, room), computed
        if self._drafter is not None and self.account.computed.may_probe():
            return self._probe(contexts, plain), [True] * len(contexts)
        return self._probe_curve(looked, plain), none

    def _with_computed(
        self, contexts: Sequence[DraftContext], looked: Sequence[list[float]]
    ) -> tuple[list[list[float]], list[bool]]:
        """Probabilities with the drafter speaking for every sequence where it is expected to do
        better.
        """
        rates = self.acceptance.rates(self.max_drafts)
        mixed, which = [], []
        for context, own in zip(contexts, looked, strict=True):
            computed = self.acceptance.survivals(context.seq_id, rates[: context.max_drafts])
            which.append(sum(computed) > sum(own))
            mixed.append(computed if which[-1] else own)
        return mixed, which

    def _num_new(self, context: DraftContext) -> int:
        return len(context.tokens) - self._read.get(context.seq_id, 0)

    def _read_one(
        self,
        contexts: Sequence[DraftContext],
        plan: DepthPlan,
        computed: Sequence[bool],
        chances: Sequence[Sequence[float]],
        room: StepCapacity,
    ) -> DepthPlan:
        """Restrict `plan` to at most one sequence whose prompt the drafter must read first.

        Reading a whole batch's prompts for one attempt costs more steps than many attempts save.
        """
        new = [
            i
            for i, (context, own) in enumerate(zip(contexts, computed, strict=True))
            if own and plan.depths[i] and self._num_new(context) > MAX_UNREAD
        ]
        if len(new) < 2:
            return plan
        depths = [0 if i in new[1:] else depth for i, depth in enumerate(plan.depths)]
        drafted = [depth for own, depth in zip(computed, depths, strict=True) if own and depth]
        costs = self.costs
        seconds = costs.step.seconds(room.num_runs, room.num_rows + sum(depths))
        if costs.draft is not None:
            seconds += costs.draft.seconds(len(drafted), max(drafted))
        more = sum(sum(own[:depth]) for own, depth in zip(chances, depths, strict=True))
        return DepthPlan(depths, room.num_runs + more, seconds)

    def _should_be_plain(self, runs: Sequence[Run], cost: StepTimeCurve) -> bool:
        """Whether this step should be plain, to keep the baseline current.

        After a number of steps with drafts, and at the start of every batch until two plain steps
        followed each other: caches left cold by drafts do not show the cost of plain decoding.
        """
        is_due = self._since_plain >= self._until_plain
        return (is_due or not cost.has_seen(len(runs))) and is_decode(runs)

    def _probe(self, contexts: Sequence[DraftContext], plain: DepthPlan) -> DepthPlan:
        """Probe with the first sequence in order, so that a draft model reads few prompts."""
        depths = [min(PROBE_DEPTH, contexts[0].max_drafts), *plain.depths[1:]]
        return DepthPlan(depths, plain.tokens, plain.seconds)

    def _probe_curve(self, looked: Sequence[list[float]], plain: DepthPlan) -> DepthPlan:
        """Draft a likely lookup that seems not to pay, on credit, to correct the measured curve."""
        depths = [sum(chance >= LIKELY for chance in own) for own in looked]
        balance = self.account.looked
        if not any(depths) or not balance.can_afford_try or not balance.may_try():
            return plain
        return DepthPlan(depths, plain.tokens, plain.seconds)

    def _proposer(
        self,
        contexts: Sequence[DraftContext],
        guesses: Sequence[LookupGuess],
        computed: Sequence[bool],
        step: DraftingStep,
    ) -> list[tuple[int, ...]]:
        """The drafts of a plan; records in `step` who made them."""
        depths = step.plan.depths
        found = [
            () if own else guess.tokens[:depth]
            for own, guess, depth in zip(computed, guesses, depths, strict=True)
        ]
        step.looked_up = {
            context.seq_id for context, draft in zip(contexts, found, strict=True) if draft
        }
        asked = [depth if own else 0 for depth, own in zip(depths, computed, strict=True)]
        if self._drafter is None or not any(asked):
            self._renew()
            return found
        for context, depth in zip(contexts, asked, strict=True):
            if depth:
                step.must_read |= self._num_new(context) > MAX_UNREAD
                self._read[context.seq_id] = len(context.tokens)
        begun_s = self._clock()
        drafted = self._drafter.draft(contexts, asked)
        step.computed_s = self._clock() - begun_s
        step.deepest, step.num_computed = max(asked), sum(depth > 0 for depth in asked)
        return [own or other for own, other in zip(found, drafted, strict=True)]

    def _idle(self, contexts: Sequence[DraftContext], step: DraftingStep) -> None:
        """Nothing is drafted: postpone the next decision."""
        for context in contexts:
            self.acceptance.idle(context.seq_id)
        self._plain_s = step.plan.seconds
        self._spend(max(self._timer.took_s(), self._timer.decision_s))
        self._rest = 1 + min(
            MAX_REST - 1, max(0, int(-self._decision_budget / self._decision_share()))
        )

    def _decision_share(self) -> float:
        """Share of every step that may be spent on deciding."""
        return DECISION_SHARE + DECISION_SHARE_OF_GAIN * self.account.recent_gain

    def _spend(self, took_s: float) -> None:
        """Account for time spent on deciding or remembering while nothing is drafted."""
        self.account.add_overhead(took_s)
        if self._plain_s:
            self._decision_budget -= took_s / self._plain_s

    # -- accounting

    def _end_undecided_step(self) -> None:
        """The step that ends made no decision."""
        if self._costs is None:
            return
        has_learnt, over_s, plain_s = self._timer.end_undecided_step(self._costs.step)
        if has_learnt:
            if self._since_plain >= self._until_plain:
                self._until_plain = min(PLAIN_STEPS, 2 * self._until_plain)
            self._since_plain = 0
        elif over_s and self._drafted is None:
            self._timer.learn_following_step(over_s)
        elif over_s and self._drafted is not None:
            self._drafted.pay(-over_s / plain_s)

    def _settle(
        self, step: DraftingStep, outcomes: Sequence[DraftOutcome], costs: DraftingCosts
    ) -> None:
        """Correct the curves by this step, and the credit by what it saved."""
        room, cost, now_s = step.room, costs.step, self._clock()
        if step.deepest and costs.draft is not None and not step.must_read:
            costs.draft.learn(step.num_computed, step.deepest, step.computed_s)
        num_drafted = sum(outcome.num_drafted for outcome in outcomes)
        took_s, plain_s = self._timer.took_s(), cost.seconds(room.num_runs, room.num_runs)
        has_prompts = room.num_rows != room.num_runs
        if has_prompts:
            more_s = cost.seconds(room.num_runs, room.num_runs + num_drafted)
            took_s += more_s + step.drafted_s - now_s
        self._since_plain += 1
        self._drafted = None
        if outcomes or step.deepest:
            self._drafted = self.account.balance(step.deepest > 0)
            self._record_drafts(step, outcomes, plain_s, took_s)
            if not has_prompts:
                cost.learn(room.num_runs, room.num_rows + num_drafted, now_s - step.drafted_s)
        elif not has_prompts:
            self._timer.learn_unused_decision(took_s - plain_s, step.drafted_s - now_s + took_s)
        self.account.add_overhead(self._clock() - now_s)

    def _record_drafts(
        self, step: DraftingStep, outcomes: Sequence[DraftOutcome], plain_s: float, took_s: float
    ) -> None:
        """Account for a step with drafts that took `took_s` where a plain one takes `plain_s`."""
        num_runs = step.room.num_runs
        per_token_s = plain_s / num_runs
        tokens = num_runs + sum(outcome.num_accepted for outcome in outcomes)
        predicted_s = per_token_s * step.plan.tokens - step.plan.seconds
        took_s = min(took_s, MAX_SLOWDOWN * max(step.plan.seconds, plain_s))
        saved_s = per_token_s * tokens - took_s
        balance = self.account.balance(step.deepest > 0)
        self.account.add_drafts(balance, saved_s, predicted_s, took_s, plain_s)
        balance.record_try(-saved_s / plain_s, was_try=step.is_try)
