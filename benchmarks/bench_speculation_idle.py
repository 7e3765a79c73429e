"""What speculation costs where nothing is drafted: a decode step with it on, against one without.

    python benchmarks/bench_speculation_idle.py [--configs ngram draft] [--quantization int8]
        [--batches 1 8] [--prompts 40] [--model demo]

Within every answer turns of seven steps are taken with speculation on and off (seven, because with
eight they would fall in with the blocks of the KV cache). On, the controller does all that it does,
but its decision is overruled: nothing is drafted, so that both kinds of step compute the same at
places alike. Prints the median step in microseconds, the excess of steps without and with a
decision, by phase; and the ratio of the means, on to off, the 5 % at either end
left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

from bench_speculation import CONFIGS, prompts_of, sampling_of, switched

from ridgeline import Engine
from ridgeline.engine.speculate.depth_control.controller import DepthController
from ridgeline.engine.speculate.depth_control.plan import plain_plan

TURN = 7
PHASES = ("plan", "run", "commit", "tell")


class Timed(NamedTuple):
    """A decode step of all slots: seconds by phase."""

    on: bool
    asked: bool
    seconds: tuple[float, ...]

    @property
    def total_s(self) -> float:
        return sum(self.seconds)


def overruled(controller: DepthController, asked: SimpleNamespace) -> None:
    """It decides, and nothing comes of it."""
    decide: Callable[..., Any] = controller._decide
    propose: Callable[..., Any] = controller.propose

    def decided(contexts: Sequence[Any], guesses: Any, room: Any) -> Any:
        decide(contexts, guesses, room)
        controller._drafting = False
        return plain_plan(len(contexts), room, controller.costs), [False] * len(contexts)

    def proposed(contexts: Any, room: Any) -> Any:
        asked.now = True
        return propose(contexts, room)

    controller._decide = decided  # type: ignore[method-assign]
    controller.propose = proposed  # type: ignore[method-assign]


def steps(engine: Engine, batch: int, num_prompts: int) -> list[Timed]:
    """Every full decode step of the answers, in order."""
    loop, asked, found = engine._loop, SimpleNamespace(now=False), list[Timed]()
    controller = loop.scheduler.draft_scheduler._proposer
    assert isinstance(controller, DepthController)
    overruled(controller, asked)
    switch, clock = switched(engine, batch, loop.clock), time.perf_counter
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        num_steps += 1
        switch.drafts, asked.now = (num_steps // TURN) % 2 == 0, False
        at = [clock()]
        plan = loop.scheduler.plan(at[0])
        view = loop.scheduler.stats()
        at.append(clock())
        result = loop._compute(plan)
        at.append(clock())
        events = loop.scheduler.commit(plan, result, at[-1])
        at.append(clock())
        if plan.runs:
            loop.steps.record(plan, view, at[0], at[1], at[2])
        loop._deliver(events)
        at.append(clock())
        if len(plan.runs) == batch and all(len(run.tokens) == 1 for run in plan.runs):
            took = tuple(b - a for a, b in pairwise(at))
            found.append(Timed(switch.drafts, asked.now, took))

    loop.step = step  # type: ignore[method-assign]
    engine.generate(prompts_of("free", num_prompts * batch), sampling_of("free", 96))
    time.sleep(0.05)
    return found[50:]


def more_us(some: Sequence[Timed], than: Sequence[Timed]) -> str:
    """By how much the medians differ, in all and by phase."""
    total = _median_us(each.total_s for each in some) - _median_us(each.total_s for each in than)
    parts = [f"{total:+.0f}"]
    for place, name in enumerate(PHASES):
        more = _median_us(x.seconds[place] for x in some)
        more -= _median_us(x.seconds[place] for x in than)
        parts.append(f"{name} {more:+.0f}")
    return " ".join(parts)


def _median_us(seconds: Any) -> float:
    return statistics.median(seconds) * 1e6


def _mean_s(some: Sequence[Timed]) -> float:
    ordered = sorted(each.total_s for each in some)
    cut = len(ordered) // 20
    return statistics.mean(ordered[cut : len(ordered) - cut])


def show(name: str, batch: int, found: Sequence[Timed]) -> None:
    off, on = [x for x in found if not x.on], [x for x in found if x.on]
    print(f"{name}, batch {batch}: {_median_us(x.total_s for x in off):.0f} us off, {len(on)} on")
    for what, some in (
        ("not asked", [x for x in on if not x.asked]),
        ("asked", [x for x in on if x.asked]),
    ):
        if len(some) >= 10:
            print(f"  {what:10} {len(some) / len(on):5.1%} of steps  {more_us(some, off)}")
    print(f"  on / off {_mean_s(on) / _mean_s(off):.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--configs", nargs="+", default=["ngram", "draft"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--prompts", type=int, default=40, help="for each slot")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    for name in args.configs:
        for batch in args.batches:
            options: dict[str, Any] = {
                "num_threads": args.threads,
                "seed": 1,
                "max_num_seqs": batch,
                "enable_prefix_caching": False,
                "quantization": args.quantization,
                "speculative_config": CONFIGS[name],
            }
            with Engine.open(args.model, **options) as engine:
                show(name, batch, steps(engine, batch, args.prompts))


if __name__ == "__main__":
    main()
