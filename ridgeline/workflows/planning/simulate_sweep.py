"""Simulate every combination of several settings, in parallel processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import msgspec

from ridgeline.config.option import options_of
from ridgeline.config.planning import SimulateOptions
from ridgeline.errors import BadInput, UserError
from ridgeline.plan.simulate.summary import FleetSummary
from ridgeline.records.progress import Observer, StageAdvanced, silent, stage
from ridgeline.report.result import Result
from ridgeline.workflows.planning.simulate import simulate

NOT_SWEPT = (
    *("catalogue", "calibration", "step_by_step", "num_seeds"),
    *("sweep", "num_workers", "html", "trace", "json"),
)
MAX_CASES = 2000


class SweepCase(msgspec.Struct, frozen=True, kw_only=True):
    """One combination: the settings changed, and its summary or the reason why it cannot run."""

    changes: dict[str, object]
    summary: FleetSummary | None = None
    problem: str = ""


class SweepResult(Result, frozen=True, kw_only=True):
    """All combinations, in the order of the axes."""

    cases: tuple[SweepCase, ...]

    def ranked(self) -> list[SweepCase]:
        """Best first.

        Fleets that meet the SLO for 99 % of their requests by device-hours, then throughput; the
        others by attainment; those that cannot run last.
        """
        return sorted(self.cases, key=_rank)


def simulate_sweep(
    options: SimulateOptions,
    axes: Sequence[str],
    *,
    num_workers: int | None = None,
    observer: Observer = silent,
) -> SweepResult:
    """Simulate every combination of `axes`, such as `replicas=1,2,4`, with `num_workers` processes.

    Raises BadInput for a setting that cannot be swept or a value of the wrong type.
    """
    combinations = combinations_of(axes)
    encoded = [
        msgspec.json.encode(msgspec.structs.replace(options, **changes)) for changes in combinations
    ]
    workers = min(num_workers or len(os.sched_getaffinity(0)), len(combinations))
    cases: dict[int, SweepCase] = {}
    name = f"{len(combinations)} fleets on {workers} cores"
    with (
        stage(observer, name, total=len(combinations), unit="fleets"),
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool,
    ):
        futures = {pool.submit(simulate_case, text): i for i, text in enumerate(encoded)}
        for future in as_completed(futures):
            i = futures[future]
            case = msgspec.json.decode(future.result(), type=SweepCase)
            cases[i] = msgspec.structs.replace(case, changes=combinations[i])
            observer(StageAdvanced(stage=name, completed=len(cases), total=len(combinations)))
    return SweepResult(cases=tuple(cases[i] for i in range(len(combinations))))


def combinations_of(axes: Sequence[str]) -> list[dict[str, object]]:
    """The product of the axes' values; the first axis varies slowest."""
    parsed = [_axis(text) for text in axes]
    names = [name for name, _ in parsed]
    if len(set(names)) < len(names):
        raise BadInput("--sweep names a setting twice", value=", ".join(names))
    combinations = [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(values for _, values in parsed))
    ]
    if len(combinations) > MAX_CASES:
        raise BadInput(
            "--sweep has too many combinations", value=len(combinations), limit=MAX_CASES
        )
    return combinations


def _axis(text: str) -> tuple[str, list[object]]:
    """The option that `replicas=1,2,4` names, and its values."""
    options = {
        option.flag[2:].replace("-", "_"): option
        for option in options_of(SimulateOptions).values()
        if option.has_flag and option.name not in NOT_SWEPT
    }
    name, _, values = text.partition("=")
    option = options.get(name.strip().replace("-", "_"))
    if option is None or not values:
        known = ", ".join(sorted(option.flag[2:] for option in {*options.values()}))
        raise BadInput("--sweep needs a setting and values", value=text, limit=known)
    return option.name, [
        option.read(value.strip(), f"{option.flag} in --sweep") for value in values.split(",")
    ]


def simulate_case(encoded: bytes) -> bytes:
    """In a worker process: simulate options given as JSON; the case, without its changes."""
    options = msgspec.json.decode(encoded, type=SimulateOptions)
    try:
        case = SweepCase(changes={}, summary=simulate(options).summary)
    except UserError as error:
        case = SweepCase(changes={}, problem=str(error))
    return msgspec.json.encode(case)


def _rank(case: SweepCase) -> tuple[int, float, float]:
    summary = case.summary
    if summary is None:
        return 2, 0.0, 0.0
    attained = summary.attainment if summary.attainment is not None else 1.0
    meets = attained >= 0.99
    return int(not meets), summary.device_hours if meets else -attained, -summary.output_tok_s
