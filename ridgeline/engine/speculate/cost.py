"""What a decode step costs: T(runs, rows), measured on this model and this machine.

At the start the runner is timed on a grid of batches and depths; between the grid's points the
curve is interpolated (kernels are staircases, so the points lie where drafts put them). While the
engine serves, every decode step that carries no prompt corrects it: contexts grow, and other work
shares the machine. What plain steps show is taken to hold for steps with drafts too, but not the
other way round: drafts that are dearer than predicted would make plain decoding look dear, and
themselves worth while.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import ridgeline._native as _native
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
_NEW, _COMMON = 0.15, 0.03  # least weights of the latest observation: for its like, for all
_STALE = 0.02  # of the way to what a step showed that knots go of which it did not tell
KNOTS = (1, 2, 3, 5, 9, 17, 25)  # rows per run
_MORE = 64  # rows beyond those that were asked for that are interpolated with them
_GREEDY = Sampling(temperature=0.0)


class StepCost:
    """T(runs, rows) in seconds; `learn` corrects it.

    What was measured at the start is multiplied by the machine's factor; a plain step's by that of
    its batch; one with drafts by that of all such steps, and by one that depends on rows per run:
    learnt at `KNOTS` and interpolated, so that neighbours tell of depths that were never tried. A
    knot that nothing is told of drifts to what others are: a depth that once looked dear, because
    something else ran, would never be tried again.
    """

    def __init__(self, grid: Grid) -> None:
        points: dict[int, list[tuple[int, float]]] = {}
        for (runs, rows), seconds in sorted(grid.items()):
            points.setdefault(runs, []).append((rows, seconds))
        self._grid = {runs: _rising(each) for runs, each in points.items()}
        self._starts: dict[int, list[float]] = {}  # for 0, 1, 2, … rows, as far as it was asked for
        self._machine, self._drafted = _Factor(), _Factor()
        self._plain: dict[int, _Factor] = {}  # by batch
        self._depths: dict[int, list[_Factor]] = {}  # by batch, at the knots

    def seconds(self, runs: int, rows: int) -> float:
        """Of a step with `runs` sequences that feed `rows` rows together."""
        if rows > runs:
            return self._lines(runs, rows, 1, rising=False)[0]
        plain = self._plain.get(runs)
        at_start_s = self._at_start(runs, rows)[rows] * self._machine.by
        return at_start_s if plain is None else at_start_s * plain.by

    def line(self, runs: int, first: int, count: int) -> list[float]:
        """Seconds for `first`, `first` + 1, … rows (more than `runs`): `count` values. None is
        larger than one with more rows behind it: a step takes no longer than one with more rows."""
        return self._lines(runs, first, count, rising=True)

    def learn(self, runs: int, rows: int, seconds: float) -> None:
        """A step that was measured. One that took ten times too long says nothing (a page fault,
        another process), and none says more than that it takes twice as long."""
        ratio = seconds / self.seconds(runs, rows)
        if ratio > 10:
            return
        ratio = min(2.0, ratio)
        if rows <= runs:
            ratio /= self._machine.move(ratio, _COMMON, _COMMON)
            self._plain.setdefault(runs, _Factor()).move(ratio, _NEW)
            return
        ratio /= self._drafted.move(ratio, _COMMON, 1 / 4)
        factors = self._depths.setdefault(runs, [_Factor() for _ in KNOTS])
        told = dict(_shares(rows / runs))
        for place, share in told.items():
            factors[place].move(ratio, _NEW, share=share)
        shown = sum(factors[place].by * share for place, share in told.items())
        for place, factor in enumerate(factors):
            if place not in told:
                factor.by += _STALE * (shown - factor.by)
        _follow(factors)

    def has_seen(self, runs: int) -> bool:
        """Whether a plain step of this batch corrected what was measured at the start."""
        return runs in self._plain

    def _lines(self, runs: int, first: int, count: int, *, rising: bool) -> list[float]:
        """Of steps with drafts; each by itself, or `rising`."""
        factors = self._depths.get(runs, ())
        return _native.step_seconds(
            self._at_start(runs, first + count),
            KNOTS,
            [factor.by for factor in factors],
            self._machine.by * self._drafted.by,
            runs,
            first,
            count,
            rising,
        )

    def _at_start(self, runs: int, rows: int) -> list[float]:
        """What was measured for 0 to `rows` rows (or more), interpolated between the batches of
        the grid on either side."""
        starts = self._starts.get(runs)
        if starts is not None and rows < len(starts):
            return starts
        batches, most = list(self._grid), rows + _MORE
        low = max((b for b in batches if b <= runs), default=batches[0])
        high = min((b for b in batches if b >= runs), default=batches[-1])
        first = _interpolated(self._grid[low], most)
        if low != high:
            share, second = (runs - low) / (high - low), _interpolated(self._grid[high], most)
            first = [a + (b - a) * share for a, b in zip(first, second, strict=True)]
        self._starts[runs] = first
        return first


class _Factor:
    """What a prediction is multiplied by."""

    __slots__ = ("by", "num")

    def __init__(self) -> None:
        self.by, self.num = 1.0, 1.0

    def move(self, ratio: float, least: float, most: float = 1.0, share: float = 1.0) -> float:
        """Towards an observation of `ratio` times what was predicted, the less the more there were,
        within `least` and `most` of the way; what it was multiplied by. A first that was slower is
        half believed, one that was faster wholly: nothing is fast by accident."""
        way = 1 / (self.num + (ratio > 1))
        self.num += share
        step = 1 + share * min(most, max(least, way)) * (ratio - 1)
        self.by *= step
        return step


def _shares(depth: float) -> tuple[tuple[int, float], ...]:
    """The knots on either side of `depth` rows per run, and what they share of it."""
    if depth >= KNOTS[-1]:
        return ((len(KNOTS) - 1, 1.0),)
    at = bisect_right(KNOTS, depth)
    share = (depth - KNOTS[at - 1]) / (KNOTS[at] - KNOTS[at - 1])
    return ((at - 1, 1 - share), (at, share))


def _follow(factors: Sequence[_Factor]) -> None:
    """A knot that no step told of is like the nearest that one did."""
    told = [place for place, factor in enumerate(factors) if factor.num > 1]
    for place, factor in enumerate(factors):
        if factor.num == 1:
            factor.by = factors[min(told, key=lambda other: abs(other - place))].by


def _rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """A step takes no longer than one with more rows: where it was timed longer, something else
    ran, and a plain step that looks slow would make every draft look free."""
    least = accumulate((seconds for _, seconds in reversed(points)), min)
    return [(rows, s) for (rows, _), s in zip(points, reversed(list(least)), strict=True)]


def _interpolated(points: Sequence[tuple[int, float]], most: int) -> list[float]:
    """For 0 to `most` rows: piecewise linear, below the first point as there, beyond the last along
    the outermost piece."""
    if len(points) == 1:
        (x0, y0) = points[0]
        return [y0 * max(1.0, rows / x0) for rows in range(most + 1)]
    found = [points[0][1]] * min(most + 1, points[0][0])
    for (x0, y0), (x1, y1) in pairwise(points):
        end = most + 1 if x1 == points[-1][0] else min(most + 1, x1)
        found += [y0 + (y1 - y0) * (rows - x0) / (x1 - x0) for rows in range(len(found), end)]
    return found


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
    at = SampleAt(_GREEDY, 0, 0, 0, is_argmax=True)
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
