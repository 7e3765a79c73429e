"""What a decode step costs: T(runs, rows), measured on this model and this machine.

At the start the runner is timed on a grid of batches and depths; between the grid's points the
curve is interpolated (kernels are staircases, so the points lie where drafts put them). While the
engine serves, every decode step that carries no prompt corrects the cell it falls into (the first
one outright), and a little the factor that is common to all of its kind: contexts grow, and other
work shares the machine. What plain steps show is taken to hold for steps with drafts too, but not
the other way round: drafts that are dearer than predicted would make plain decoding look dear, and
themselves worth while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from ridgeline.engine.core.plan import Run, Runner, SampleAt, StepPlan
from ridgeline.records import Sampling

Grid = Mapping[tuple[int, int], float]
"""(runs, rows) → seconds of a step."""

BATCHES = (1, 2, 4, 8, 16, 32, 64)
DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)
MOST_ROWS = 64  # of a measured step that is deeper than DEEP
DEEP = 8
CONTEXT = 128  # tokens before each run of a measured step, where so many fit
REPEATS = ((0.02, 5), (0.1, 3))  # times a step is timed that takes up to so many seconds; else 2
BUDGET_S = 3.0
_NEW, _COMMON = 0.15, 0.03  # weights of the latest observation: for its cell, for all of its kind
_GREEDY = Sampling(temperature=0.0)


class StepCost:
    """T(runs, rows) in seconds; `learn` corrects it."""

    def __init__(self, grid: Grid) -> None:
        self._grid: dict[int, list[tuple[int, float]]] = {}
        for (runs, rows), seconds in sorted(grid.items()):
            self._grid.setdefault(runs, []).append((rows, seconds))
        self._grid = {runs: _rising(points) for runs, points in self._grid.items()}
        self._lines: dict[int, list[float]] = {}
        self._own: dict[tuple[int, int], float] = {}  # of a cell, besides the common factor
        self._num: dict[tuple[int, int], int] = {}
        self._scale = {False: 1.0, True: 1.0}  # of plain steps, of steps with drafts
        self._machine = 1.0  # of all: how fast the machine is by now

    def seconds(self, runs: int, rows: int) -> float:
        """Of a step with `runs` sequences that feed `rows` rows together."""
        own = self._own.get((runs, rows), 1.0)
        return self._machine * self._scale[rows > runs] * own * self._at_start(runs, rows)

    def line(self, runs: int, first: int, count: int) -> list[float]:
        """Seconds for `first`, `first` + 1, … rows: `count` values, cheaper than one by one."""
        own, scale = self._own, {k: x * self._machine for k, x in self._scale.items()}
        starts = self._starts(runs)
        starts += [self._at_start(runs, rows) for rows in range(len(starts), first + count)]
        rows = range(first, first + count)
        return [scale[r > runs] * own.get((runs, r), 1.0) * starts[r] for r in rows]

    def _starts(self, runs: int) -> list[float]:
        """What was measured at the start for 0, 1, 2, … rows, as far as it was asked for."""
        return self._lines.setdefault(runs, [0.0])

    def learn(self, runs: int, rows: int, seconds: float) -> None:
        """A step that was measured. One that took ten times too long says nothing (a page fault,
        another process)."""
        ratio = seconds / self.seconds(runs, rows)
        if ratio > 10:
            return
        cell, common = (runs, rows), 1 + _COMMON * (ratio - 1)
        self._scale[rows > runs] *= common
        if rows == runs:
            self._machine *= common
        num = self._num[cell] = self._num.get(cell, 0) + 1
        wanted = 1 + max(_NEW, 1 / num) * (ratio - 1)
        moved = common * common if rows == runs else common
        self._own[cell] = self._own.get(cell, 1.0) * wanted / moved

    def has_seen(self, runs: int) -> bool:
        """Whether a plain step of this batch corrected what was measured at the start."""
        return (runs, runs) in self._num

    def _at_start(self, runs: int, rows: int) -> float:
        """Interpolated between the batches of the grid on either side."""
        batches = list(self._grid)
        low = max((b for b in batches if b <= runs), default=batches[0])
        high = min((b for b in batches if b >= runs), default=batches[-1])
        first = _interpolated(self._grid[low], rows)
        if low == high:
            return first
        second = _interpolated(self._grid[high], rows)
        return first + (second - first) * (runs - low) / (high - low)


def _rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """A step takes no longer than one with more rows: where it was timed longer, something else
    ran, and a plain step that looks slow would make every draft look free."""
    least = accumulate((seconds for _, seconds in reversed(points)), min)
    return [(rows, s) for (rows, _), s in zip(points, reversed(list(least)), strict=True)]


def _interpolated(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Piecewise linear; beyond the ends, along the outermost piece (never below its least)."""
    if len(points) == 1:
        return points[0][1] * max(1.0, rows / points[0][0])
    at = next((i for i in range(1, len(points) - 1) if rows <= points[i][0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return max(min(y for _, y in points), y0 + (y1 - y0) * (rows - x0) / (x1 - x0))


def measure(
    runner: Runner,
    clock: Callable[[], float],
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    budget_s: float = BUDGET_S,
) -> dict[tuple[int, int], float]:
    """Time decode steps on scratch blocks of a cache that nobody uses yet: medians, in seconds.

    Ends early, with the smaller batches measured, when `budget_s` is spent.
    """
    longest = min(max_model_len, num_blocks * block_size, CONTEXT + max(DEPTHS) + 1)
    depths = [depth for depth in DEPTHS if depth + 2 <= longest]
    context = max(1, longest - max(depths) - 1)
    blocks_each = -(-longest // block_size)
    most = max(1, min(max_num_seqs, num_blocks // blocks_each))
    begun_s = clock()
    found: dict[tuple[int, int], float] = {}
    for runs in sorted({*(b for b in BATCHES if b < most), most}):
        for depth in depths:
            late = clock() - begun_s > budget_s
            if late and depth == 0 and runs > 1:
                return found
            if depth > DEEP and (late or runs * (depth + 1) > MOST_ROWS):
                break
            plan = _plan(runs, depth, context, blocks_each)
            found[runs, runs * (depth + 1)] = _median_s(runner, plan, clock)
    return found


def _median_s(runner: Runner, plan: StepPlan, clock: Callable[[], float]) -> float:
    first_s = _timed(runner, plan, clock)
    repeats = next((num for limit_s, num in REPEATS if first_s < limit_s), 2)
    times = sorted(_timed(runner, plan, clock) for _ in range(repeats))
    return times[(repeats - 1) // 2]


def _plan(runs: int, depth: int, context: int, blocks_each: int) -> StepPlan:
    at = SampleAt(_GREEDY, 0, 0, 0)
    return StepPlan(
        0,
        tuple(
            Run(
                seq_id=i,
                start=context,
                tokens=(1,) * (depth + 1),
                blocks=tuple(range(i * blocks_each, (i + 1) * blocks_each)),
                sample=at,
                num_drafts=depth,
            )
            for i in range(runs)
        ),
    )


def _timed(runner: Runner, plan: StepPlan, clock: Callable[[], float]) -> float:
    begun_s = clock()
    runner.run(plan)
    return clock() - begun_s


class DraftCost:
    """Seconds that a drafter takes for `sequences` drafts of `depth` tokens: a + b·k + c·n + d·n·k,
    from four measurements, corrected as it is used."""

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
