"""The cost of a decode step, T(runs, rows), measured on this model and machine.

At start the runner is timed on a grid of batch sizes and depths; the curve interpolates between
them (kernel times are staircases, so the grid points are where drafts put them). While the engine
serves, every decode step without prompts corrects it, since contexts grow and other work shares the
machine. Corrections from plain steps also apply to steps with drafts, but not vice versa: drafts
that cost more than predicted would make plain decoding look expensive, and themselves worthwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import ridgeline._native as _native
from ridgeline.engine.scheduler.kv.block_tables import UnusedTables
from ridgeline.engine.scheduler.plan import Run, Runner, SamplePoint, StepPlan
from ridgeline.modelspec.cost.kv_layout import ONE_GROUP, KvLayout
from ridgeline.records import Sampling

Grid = Mapping[tuple[int, int], float]
"""(runs, rows) → seconds of a step."""

BATCHES = (1, 2, 4, 8, 16, 32, 64)
DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)
MOST_ROWS = 64  # of a measured step that is deeper than DEEP
DEEP = 8
CONTEXT = 128  # tokens before each run of a measured step, if they fit
# (seconds, repetitions): steps up to this long are timed this often; longer ones twice.
REPEATS = ((0.02, 5), (0.1, 3))
BUDGET_S = 3.0
_NEW = 0.15  # weight of the latest draft in what drafting is taken to cost
KNOTS = (1, 2, 3, 5, 9, 17, 25)  # rows per run
_GREEDY = Sampling(temperature=0.0)


class StepTimeCurve:
    """T(runs, rows) in seconds; `learn` corrects it.

    The initial measurement is multiplied by a factor of the machine; a plain step's also by that of
    its batch; one with drafts by that of all such steps and by one that depends on rows per run,
    learnt at `KNOTS` and interpolated. A knot without observations drifts towards the others:
    otherwise a depth that once looked expensive because of a disturbance would never be tried
    again.
    """

    def __init__(self, grid: Grid) -> None:
        points: dict[int, list[tuple[int, float]]] = {}
        for (runs, rows), seconds in sorted(grid.items()):
            points.setdefault(runs, []).append((rows, seconds))
        self._curve = _native.StepCurve({runs: _rising(p) for runs, p in points.items()}, KNOTS)

    def seconds(self, runs: int, rows: int) -> float:
        """Seconds of a step with `runs` sequences that feed `rows` rows in total."""
        return self._curve.seconds(runs, rows)

    def line(self, runs: int, first: int, count: int) -> list[float]:
        """Seconds for `count` row counts from `first` on (more than `runs`); non-decreasing."""
        return self._curve.line(runs, first, count)

    def learn(self, runs: int, rows: int, seconds: float) -> None:
        """Take in a measured step.

        A step ten times too long is ignored (a page fault, another process), and none counts as
        more than twice as long. A first observation that is slower counts half, a faster one fully:
        no step is fast by accident.
        """
        self._curve.learn(runs, rows, seconds)

    def has_seen(self, runs: int) -> bool:
        """Whether a plain step of this batch size corrected the initial measurement."""
        return self._curve.has_seen(runs)


def _rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Make times non-decreasing in rows: a longer one with fewer rows was a disturbance."""
    least = accumulate((seconds for _, seconds in reversed(points)), min)
    return [(rows, s) for (rows, _), s in zip(points, reversed(list(least)), strict=True)]


def measure(
    runner: Runner,
    clock: Callable[[], float],
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    layout: KvLayout = ONE_GROUP,
    budget_s: float = BUDGET_S,
) -> dict[tuple[int, int], float]:
    """Median seconds of decode steps on unused blocks of the cache.

    Ends after `budget_s` with the smaller batches measured.
    """
    places = num_blocks // layout.num_groups
    longest = min(max_model_len, places * block_size, CONTEXT + max(DEPTHS) + 1)
    depths = [depth for depth in DEPTHS if depth + 2 <= longest]
    context = max(1, longest - max(depths) - 1)
    tables = UnusedTables(layout, -(-longest // block_size))
    most = max(1, min(max_num_seqs, places // tables.num_places))
    begun_s = clock()
    found: dict[tuple[int, int], float] = {}
    for runs in sorted({*(b for b in BATCHES if b < most), most}):
        for depth in depths:
            late = clock() - begun_s > budget_s
            if late and depth == 0 and runs > 1:
                return found
            if depth > DEEP and (late or runs * (depth + 1) > MOST_ROWS):
                break
            plan = _plan(runs, depth, context, tables)
            found[runs, runs * (depth + 1)] = _median_s(runner, plan, clock)
    return found


def _median_s(runner: Runner, plan: StepPlan, clock: Callable[[], float]) -> float:
    first_s = _timed(runner, plan, clock)
    repeats = next((num for limit_s, num in REPEATS if first_s < limit_s), 2)
    times = sorted(_timed(runner, plan, clock) for _ in range(repeats))
    return times[(repeats - 1) // 2]


def _plan(runs: int, depth: int, context: int, tables: UnusedTables) -> StepPlan:
    at = SamplePoint(_GREEDY, 0, 0, 0, is_argmax=True)
    return StepPlan(
        0,
        tuple(
            Run(
                seq_id=i,
                start=context,
                tokens=(1,) * (depth + 1),
                sample=at,
                num_drafts=depth,
                **tables.of(i),
            )
            for i in range(runs)
        ),
    )


def _timed(runner: Runner, plan: StepPlan, clock: Callable[[], float]) -> float:
    begun_s = clock()
    runner.run(plan)
    return clock() - begun_s


class DraftCost:
    """Seconds for `sequences` drafts of `depth` tokens: a + b·k + c·n + d·n·k, from four
    measurements and corrected in use.
    """

    def __init__(self, samples: Iterable[tuple[int, int, float]]) -> None:
        import numpy as np

        rows = list(samples)
        terms = [[1.0, k, n, n * k] for n, k, _ in rows]
        found = np.linalg.lstsq(np.array(terms), np.array([s for *_, s in rows]), rcond=None)[0]
        self._terms = [float(x) for x in found]
        self._least = min(s for *_, s in rows)
        self._scale = 1.0

    def seconds(self, sequences: int, depth: int) -> float:
        if not sequences or not depth:
            return 0.0
        return self._scale * self._at_start(sequences, depth)

    def learn(self, sequences: int, depth: int, seconds: float) -> None:
        ratio = min(5.0, seconds / self._at_start(sequences, depth))
        self._scale += _NEW * (ratio - self._scale)

    def _at_start(self, sequences: int, depth: int) -> float:
        a, b, c, d = self._terms
        return max(1e-9, self._least / 2, a + b * depth + c * sequences + d * sequences * depth)
