"""What the engine counts: a StepStat per step in a bounded ring, and totals since its opening."""

from __future__ import annotations

from collections import deque

from ridgeline.engine.core.plan import StepPlan
from ridgeline.engine.core.step import StepView
from ridgeline.records import Ask, Event, Failed, Finished, StepStat

MAX_STEPS = 100_000
"""Steps kept for `drain`; the oldest are forgotten first. At 10 ms a step: 17 minutes."""


class StepLog:
    """Written by the engine thread, drained by any other."""

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._ring: deque[StepStat] = deque(maxlen=max_steps)

    def note(
        self, plan: StepPlan, view: StepView, began_s: float, planned_s: float, done_s: float
    ) -> None:
        """One step with runs. `view` is the scheduler's, taken between plan and commit."""
        self._ring.append(
            StepStat(
                index=plan.index,
                at_s=began_s,
                plan_s=planned_s - began_s,
                run_s=done_s - planned_s,
                shapes=tuple((len(run.tokens), run.start) for run in plan.runs),
                num_sampled=sum(run.sample is not None for run in plan.runs),
                num_running=view.num_running,
                num_waiting=view.num_waiting,
                used_blocks=view.used_blocks,
                num_blocks=view.num_blocks,
                max_num_seqs=view.max_num_seqs,
                num_preempted=view.num_preempted,
                queried_tokens=view.queried_tokens,
                hit_tokens=view.hit_tokens,
            )
        )

    def drain(self) -> list[StepStat]:
        """The steps since the last call, oldest first."""
        return [self._ring.popleft() for _ in range(len(self._ring))]


class AskCounts:
    """Totals over asks. Written by the engine thread, read by any other."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(
            ("prompt_tokens", "request_success_stop", "request_success_length"), 0
        ) | dict.fromkeys(("request_success_abort", "request_failed"), 0)

    def asked(self, ask: Ask) -> None:
        self._counts["prompt_tokens"] += len(ask.prompt)

    def told(self, event: Event) -> None:
        if isinstance(event, Finished):
            self._counts[f"request_success_{event.reason}"] += 1
        elif isinstance(event, Failed):
            self._counts["request_failed"] += 1

    def as_dict(self) -> dict[str, float]:
        return {name: float(count) for name, count in self._counts.items()}
