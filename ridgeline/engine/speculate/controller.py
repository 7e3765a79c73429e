"""How deep to draft, for whom, in this step: as deep as pays, from measured costs.

What. Every draft token that could ride in the step has a chance to be accepted (`acceptance.py`)
and makes the step longer by what the measured curve says (`cost.py`). Tokens are added in order of
falling chance, and the number is taken at which

    expected tokens / (T(runs, rows) + what drafting costs)

is largest. If that is not clearly more than the step gives without drafts, nothing is drafted.

Never lose. The predicted gain must exceed a margin (half of it, while drafting: hysteresis), and
there is an account in seconds. Every step pays in a small share of its time; every draft pays in
what plain decoding would have taken for the same tokens, less what was taken. Drafting, and probing
while drafting does not pay, are only done on credit; so whatever the predictions are worth, what is
lost is at most that share, and what the account may hold (a few steps). While drafting, a plain
step now and then keeps what it is compared with up to date.

Source. SmartSpec / TurboSpec (Liu et al. 2024, arXiv 2406.14066): goodput as the objective; the
curve instead of a roofline, because kernels are staircases.

Invariant. Depth changes no token of requests that are greedy or have a seed (`walk.py`), and no
distribution (`rejection.py`).
When it loses. It decides in Python: about 10 µs per running sequence, in each step that drafts and
in every sixth that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ridgeline.engine.core.drafting import Open, Room, Verdict
from ridgeline.engine.speculate.acceptance import Acceptance
from ridgeline.engine.speculate.base import Drafter
from ridgeline.engine.speculate.cost import DraftCost, StepCost

MARGIN = 0.03
PROBE_STEPS, ASK_STEPS, PLAIN_STEPS = 48, 6, 40
FIRST_PLAIN = (2, 6, 16)  # drafting steps that are left out to see what they are compared with
LOSS_SHARE = 0.005  # of every step's time that may be lost to drafts
FIRST_CREDIT, MOST_CREDIT = 3.0, 6.0  # plain steps' worth of seconds


class Step:
    """What was decided for the step under way, and when."""

    __slots__ = ("deepest", "drafted_s", "num_opens", "planned_s", "room")

    def __init__(self, room: Room, num_opens: int, planned_s: float, drafted_s: float) -> None:
        self.room, self.num_opens = room, num_opens
        self.planned_s, self.drafted_s = planned_s, drafted_s
        self.deepest = 0


class Controller:
    """See the head of this file. `most`: drafts per sequence and step at the very most."""

    def __init__(self, drafter: Drafter, most: int, clock: Callable[[], float]) -> None:
        self.acceptance = Acceptance()
        self.saved_s = 0.0
        self._drafter, self._most, self._clock = drafter, most, clock
        self._step_cost: StepCost | None = None
        self._draft_cost: DraftCost | None = None
        self._under_way: Step | None = None
        self._drafting, self._since_probe, self._num_rested = False, 0, 0
        self._num_drafting = 0
        self._credit = FIRST_CREDIT  # in plain steps

    def calibrate(self, step_cost: StepCost, draft_cost: DraftCost) -> None:
        """Before it nothing is drafted."""
        self._step_cost, self._draft_cost = step_cost, draft_cost

    # -- the scheduler's side

    def propose(self, opens: Sequence[Open], room: Room) -> list[tuple[int, ...]]:
        planned_s = self._clock()
        depths = self.depths(opens, room)
        step = self._under_way = Step(room, len(opens), planned_s, planned_s)
        step.deepest = max(depths, default=0)
        if not step.deepest and not self._probe(opens, depths):
            self._idle(opens)
            return [()] * len(opens)
        step.deepest = max(depths)
        found = self._drafter.draft(opens, depths)
        step.drafted_s = self._clock()
        return found

    def learn(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            self.acceptance.learn(verdict.seq_id, verdict.num_drafted, verdict.num_accepted)
        step, self._under_way = self._under_way, None
        if step is not None and self._step_cost is not None:
            self._account(step, verdicts, self._step_cost)

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self.acceptance.forget(seq_id)
        self._drafter.forget(seq_id, tokens, tenant)

    # -- deciding

    def depths(self, opens: Sequence[Open], room: Room) -> list[int]:
        """Depth per sequence that gives most tokens per second; all 0 where none is clearly worth
        it."""
        cost, drafting = self._step_cost, self._draft_cost
        depths = [0] * len(opens)
        if cost is None or drafting is None or not opens or self._rests():
            return depths
        rates = self.acceptance.rates(self._most)
        chances = self._chances(opens, rates)[: room.num_free]
        plain = room.num_runs / cost.seconds(room.num_runs, room.num_rows)
        best, num_best = self._best(chances, room, len(opens))
        needed = MARGIN / 2 if self._drafting else MARGIN
        self._drafting = best > plain * (1 + needed) and self._credit > 0
        if self._drafting:
            for _, i, place in chances[:num_best]:
                depths[i] = max(depths[i], place + 1)
        return depths

    def _rests(self) -> bool:
        """While nothing is drafted, the question is asked every few steps only; while something
        is, a plain step now and then."""
        if self._drafting:
            self._num_rested, self._num_drafting = 0, self._num_drafting + 1
            return self._num_drafting in FIRST_PLAIN or self._num_drafting % PLAIN_STEPS == 0
        self._num_rested += 1
        return self._num_rested % ASK_STEPS > 1

    def _chances(
        self, opens: Sequence[Open], rates: Sequence[float]
    ) -> list[tuple[float, int, int]]:
        """(chance, sequence, place) of every token that could be drafted, likeliest first."""
        found = [
            (chance, i, place)
            for i, each in enumerate(opens)
            for place, chance in enumerate(
                self.acceptance.survivals(each.seq_id, rates[: each.most])
            )
        ]
        found.sort(key=lambda entry: (-entry[0], entry[2]))
        return found

    def _best(
        self, chances: Sequence[tuple[float, int, int]], room: Room, num_opens: int
    ) -> tuple[float, int]:
        """The highest rate over how many of `chances` are drafted, and that number."""
        assert self._step_cost is not None and self._draft_cost is not None
        best, num_best, tokens, deepest, drafting_s = 0.0, 0, float(room.num_runs), 0, 0.0
        line = self._step_cost.line(room.num_runs, room.num_rows + 1, len(chances))
        for num, (chance, _, place) in enumerate(chances, 1):
            tokens += chance
            if place >= deepest:
                deepest = place + 1
                drafting_s = self._draft_cost.seconds(num_opens, deepest)
            rate = tokens / (line[num - 1] + drafting_s)
            if rate > best:
                best, num_best = rate, num
        return best, num_best

    def _probe(self, opens: Sequence[Open], depths: list[int]) -> bool:
        """Every so often, a short draft for the first in order, although it does not pay. The first
        stays the first until it is finished, so that a draft model reads few prompts for this."""
        self._since_probe += 1
        if self._since_probe < PROBE_STEPS or not opens or self._step_cost is None:
            return False
        if self._drafting or self._credit < 1:
            return False
        self._since_probe = 0
        depths[0] = min(2, opens[0].most)
        return True

    def _idle(self, opens: Sequence[Open]) -> None:
        for each in opens:
            self.acceptance.idle(each.seq_id)

    # -- accounting

    def _account(self, step: Step, verdicts: Sequence[Verdict], cost: StepCost) -> None:
        """Correct the curves by this step, and the balance by what it saved."""
        room, now_s = step.room, self._clock()
        rows = room.num_rows + sum(verdict.num_drafted for verdict in verdicts)
        plain = room.num_rows == room.num_runs
        if step.deepest and self._draft_cost is not None:
            took_s = step.drafted_s - step.planned_s
            self._draft_cost.learn(step.num_opens, step.deepest, took_s)
        if not plain:
            return
        plain_s = cost.seconds(room.num_runs, room.num_rows)
        self._credit = min(MOST_CREDIT, self._credit + LOSS_SHARE)
        if step.deepest:
            tokens = room.num_runs + sum(verdict.num_accepted for verdict in verdicts)
            saved_s = plain_s * tokens / room.num_runs - (now_s - step.planned_s)
            self.saved_s += saved_s
            self._credit = min(MOST_CREDIT, self._credit + saved_s / plain_s)
        cost.learn(room.num_runs, rows, now_s - step.drafted_s)
