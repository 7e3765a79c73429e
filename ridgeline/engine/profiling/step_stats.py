"""Statistics of the engine: a StepStat per step in a ring buffer, and totals since opening."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from operator import add

from ridgeline.engine.scheduler.plan import StepPlan, draft_paths
from ridgeline.engine.scheduler.step_builder import SchedulerStats
from ridgeline.modelspec.cost import CostModel
from ridgeline.records import Event, Failed, Finished, Request, StepStat

MAX_STEPS = 100_000
"""Steps kept for `drain`, the oldest being dropped first. At 10 ms per step: 17 minutes."""

RECENT = 128
"""Steps over which the current utilisation is computed."""

NEARLY_ALL = 0.9
"""Share of the token budget beyond which a step has no room for another prompt."""

TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of tokens per step, those of vLLM's iteration_tokens_total."""

_SUMS = (
    *("tokens", "seqs", "slots", "busy_s", "flops", "bytes"),
    # Waiting sequences times seconds: in all; with every slot taken; with the token budget spent.
    *("plan_s", "waiting_s", "full_waiting_s", "spent_waiting_s"),
    # Slots times seconds: in all; empty while sequences waited.
    *("slot_s", "wasted_slot_s"),
)


class StepTotals:
    """Sums over all steps and over the latest `RECENT` ones.

    `token_budget` is the token budget of one step.
    """

    def __init__(self, model: CostModel, token_budget: int) -> None:
        self._model, self._spent = model, NEARLY_ALL * token_budget
        self._sums = (0.0,) * len(_SUMS)
        self._recent: deque[tuple[float, ...]] = deque(maxlen=RECENT)
        self._by_tokens = [0] * (len(TOKEN_BUCKETS) + 1)

    def add(self, stat: StepStat) -> None:
        """Add one step."""
        work = self._model.step(stat.shapes, stat.num_sampled)
        num_tokens = sum([new for new, _ in stat.shapes])
        busy_s = stat.plan_s + stat.run_s
        waiting_s = stat.num_waiting * busy_s
        full = stat.num_running >= stat.max_num_seqs
        spent = not full and num_tokens >= self._spent
        wasted_s = max(0, stat.max_num_seqs - stat.num_running) * busy_s if waiting_s else 0.0
        num_seqs = min(len(stat.shapes), stat.num_running)  # a draft tree has several paths
        row = (
            *(num_tokens, num_seqs, stat.max_num_seqs, busy_s, work.flops, work.bytes),
            *(stat.plan_s, waiting_s, waiting_s * full, waiting_s * spent),
            *(stat.max_num_seqs * busy_s, wasted_s),
        )
        self._sums = tuple(map(add, self._sums, row))
        self._recent.append(row)
        self._by_tokens[bisect_left(TOKEN_BUCKETS, num_tokens)] += 1

    def as_dict(self) -> dict[str, float]:
        """`step_*` are totals since the engine was opened, `recent_*` sums of the latest steps.

        `step_tokens_le_N` counts the steps of at most N tokens.
        """
        rows = [(0.0,) * len(_SUMS), *self._recent]
        recent = map(sum, zip(*rows, strict=True))
        below = accumulate(self._by_tokens)
        named = zip((*map(str, TOKEN_BUCKETS), "inf"), below, strict=True)
        return (
            {f"step_{name}": float(v) for name, v in zip(_SUMS, self._sums, strict=True)}
            | {f"recent_{name}": float(v) for name, v in zip(_SUMS, recent, strict=True)}
            | {f"step_tokens_le_{name}": float(number) for name, number in named}
        )


def shapes_of(plan: StepPlan) -> tuple[tuple[int, int], ...]:
    """(new tokens, tokens in the cache) of every path a step feeds."""
    paths = [path for run in plan.runs for path in draft_paths(run)]
    return tuple([(len(path.tokens), path.num_cached) for path in paths])


class StepLog:
    """The recent steps. Written by the engine thread, drained by any other thread."""

    def __init__(self, totals: StepTotals, max_steps: int = MAX_STEPS) -> None:
        self.totals = totals
        self._ring: deque[StepStat] = deque(maxlen=max_steps)

    def record(
        self,
        plan: StepPlan,
        stats: SchedulerStats,
        began_s: float,
        planned_s: float,
        done_s: float,
    ) -> None:
        """Add a step with runs. `stats` must be taken between its plan and its commit."""
        stat = StepStat(
            index=plan.index,
            at_s=began_s,
            plan_s=planned_s - began_s,
            run_s=done_s - planned_s,
            shapes=shapes_of(plan),
            num_sampled=sum([run.sample is not None for run in plan.runs]),
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            used_blocks=stats.used_blocks,
            num_blocks=stats.num_blocks,
            max_num_seqs=stats.max_num_seqs,
            num_preempted=stats.num_preempted,
            queried_tokens=stats.queried_tokens,
            hit_tokens=stats.hit_tokens,
        )
        self._ring.append(stat)
        self.totals.add(stat)

    def drain(self) -> list[StepStat]:
        """Remove and return the steps since the last call, oldest first."""
        return [self._ring.popleft() for _ in range(len(self._ring))]


class RequestCounts:
    """Totals over requests. Written by the engine thread, read by any other thread."""

    def __init__(self) -> None:
        self._counts = {
            "prompt_tokens": 0,
            "request_success_stop": 0,
            "request_success_length": 0,
            "request_success_abort": 0,
            "request_failed": 0,
        }

    def count_request(self, request: Request) -> None:
        """Count a submitted request."""
        self._counts["prompt_tokens"] += len(request.prompt)

    def count_end(self, event: Event) -> None:
        """Count the end of a choice or the failure of a request."""
        if isinstance(event, Finished):
            self._counts[f"request_success_{event.reason}"] += 1
        elif isinstance(event, Failed):
            self._counts["request_failed"] += 1

    def as_dict(self) -> dict[str, float]:
        return {name: float(count) for name, count in self._counts.items()}
