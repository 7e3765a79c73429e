"""Servers with prefill and decode apart, on a virtual clock with the step times of the search.

Both pools run the engine's scheduler. A prompt's keys and values travel to the server that decodes,
and its answer waits for them: that is the price of the layout, next to the half with less work that
idles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.optimize.environment import Load
from ridgeline.optimize.external.split_layout import SplitLayout
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.records import FleetConfig, ReplicaConfig, SimulatedRequest
from ridgeline.plan.simulate.single import Arrival
from ridgeline.plan.simulate.summary import traces
from ridgeline.plan.step_time.simulated import LinearSteps
from ridgeline.records import RequestTrace, RunTrace
from ridgeline.workflows.optimize.calibrated_step_times import Shapes, StepSeconds

PREFIX_BLOCK = 64  # tokens: prefixes differ in steps of this length
MAX_ID = (1 << 40) - 1


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """A layout, and the seconds in which the KV cache of a number of tokens travels."""

    layout: SplitLayout
    transfer_s: Callable[[int], float]


class _StepTimes:
    def __init__(self, step_s: StepSeconds) -> None:
        self._step_s = step_s

    def step_s(self, shapes: Shapes, num_sampled: int) -> float:
        return self._step_s(shapes, num_sampled)

    def linear_steps(self, computed: Sequence[int], num_steps: int) -> LinearSteps | None:
        return None  # measured step times follow no line


def simulate_split(
    split: Split,
    schedulers: tuple[Callable[[], Scheduler], Callable[[], Scheduler]],
    step_s: StepSeconds,
    arrivals: Sequence[Arrival],
    load: Load,
) -> RunTrace:
    """The run of `arrivals` on the layout, whose servers have the same step times.

    `schedulers`: of servers that compute prompts, and of those that decode. The latter need a
    prefix cache: it is where the simulation puts what is transferred.
    """
    prefill, decode = (
        ReplicaConfig(name=name, scheduler=scheduler, step_times=_StepTimes(step_s))
        for name, scheduler in zip(("prefill", "decode"), schedulers, strict=True)
    )
    fleet = FleetConfig(
        replicas=(prefill,) * split.layout.num_prefill,
        decode=(decode,) * split.layout.num_decode,
        transfer_s=split.transfer_s,
        seed=load.seed,
        fast_forward=False,
    )
    requests = [_request(str(i), arrival) for i, arrival in enumerate(arrivals)]
    outcome = simulate_fleet(requests, fleet, end_s=load.window_s + load.grace_s)
    rows = traces(outcome, max(1, len(requests)))
    return load.simulated(outcome.duration_s, tuple(_spread(row) for row in rows))


def _request(name: str, arrival: Arrival) -> SimulatedRequest:
    prompt, ids = arrival.prompt, list[int]()
    for end in range(PREFIX_BLOCK, len(prompt), PREFIX_BLOCK):
        block = (ids[-1] if ids else 0, prompt[end - PREFIX_BLOCK : end])
        ids.append(hash(block) & MAX_ID)  # of integers, so equal in every process
    return SimulatedRequest(
        at_s=arrival.at_s,
        num_prompt=len(prompt),
        num_output=arrival.num_output,
        prefix=tuple(ids),
        prefix_block=PREFIX_BLOCK,
        session=name,
        kind=arrival.kind,
    )


def _spread(row: RequestTrace) -> RequestTrace:
    """Output tokens evenly between the first and the last, whose times are known."""
    if not row.token_s:
        return msgspec.structs.replace(row, error="unfinished when the simulation ended")
    times = np.linspace(row.token_s[0], row.token_s[-1], row.output_tokens)
    return msgspec.structs.replace(
        row, token_s=tuple(times.tolist()), token_counts=(1,) * row.output_tokens
    )
