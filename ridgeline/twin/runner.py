"""The runner of a twin: waits as long as a step would take, and answers with synthetic tokens.

A step that continues sequences of the previous one began when that one ended, on the modelled
device: what this process spends between two steps is part of the modelled time, not added to it. A
step whose end has already passed is late. The next ones catch up, by at most `MAX_CATCH_UP_S`, so
that a short stall does not shift everything after it. `late_s` counts the delay that remains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ridgeline.engine.kv_tiers.block_tiers import NoBlockTiers
from ridgeline.engine.scheduler.plan import Run, RunOutput, StepPlan, StepResult
from ridgeline.errors import CannotRun
from ridgeline.plan.step_time.simulated import HostedStepTimes
from ridgeline.records import TokenLogprobs
from ridgeline.twin.masked_choice import MaskedChoice
from ridgeline.twin.synthetic_model import SyntheticModel

MAX_CATCH_UP_S = 0.05


class ModelledTiers(NoBlockTiers):
    """Host memory below the cache, of which only the time counts: its blocks hold nothing."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def transfer(self, plan: StepPlan) -> None:
        """Nothing is copied; the runner waits as long as it would take."""

    def describe(self) -> str:
        return f"modelled: {self._num_bytes / 1e9:.1f} GB of memory" if self._num_bytes else "none"


def no_transfer(plan: StepPlan) -> float:
    """Copies of a server without tiers take no time."""
    return 0.0


class ModelledRunner:
    """Runs plans on a modelled device. `speed`: modelled seconds per second of `clock`.
    `transfer_s`: what a plan's copies to and from host memory add to its step.
    """

    def __init__(
        self,
        step_times: HostedStepTimes,
        model: SyntheticModel,
        masked: MaskedChoice,
        *,
        speed: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        transfer_s: Callable[[StepPlan], float] = no_transfer,
    ) -> None:
        self._step_times, self._model, self._masked = step_times, model, masked
        self._speed, self._clock, self._sleep = speed, clock, sleep
        self._transfer_s = transfer_s
        self._end_s = 0.0  # when the previous step ended, on the modelled device
        self._previous: frozenset[int] = frozenset()
        self.late_s = 0.0

    def graph_counters(self) -> dict[str, float]:
        """None: nothing is computed."""
        return {}

    def describe_graphs(self) -> str:
        """What takes the place of graphs."""
        return "no CUDA graphs: steps are modelled"

    def run(self, plan: StepPlan) -> StepResult:
        """Wait until the step has ended on the modelled device, and return its tokens."""
        runs = plan.runs
        if not runs:
            return StepResult(())
        shapes = [(len(run.tokens), run.num_cached) for run in runs]
        num_sampled = sum([run.sample is not None for run in runs])
        began_s = self._began_s(runs)
        took_s = self._step_times.step_s(shapes, num_sampled) + self._transfer_s(plan)
        self._end_s = began_s + took_s / self._speed
        outputs = tuple([self._output(run) for run in runs])
        left_s = self._end_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        return StepResult(outputs)

    def _began_s(self, runs: Sequence[Run]) -> float:
        now_s = self._clock()
        ids = frozenset([run.seq_id for run in runs])
        continues = not ids.isdisjoint(self._previous)
        self._previous = ids
        if not continues:
            return now_s
        delay_s = now_s - self._end_s - MAX_CATCH_UP_S
        if delay_s <= 0:
            return self._end_s
        self.late_s += delay_s
        return self._end_s + delay_s

    def _output(self, run: Run) -> RunOutput:
        prompt = () if run.prompt_logprobs is None else self._prompt_logprobs(run)
        point = run.sample
        if point is None:
            return RunOutput(prompt_logprobs=prompt)
        last, position = run.tokens[-1], run.start + len(run.tokens) - 1
        is_masked = point.sampling.is_masked
        token = (
            self._masked.choose(point)
            if is_masked
            else self._model.next_token(last, position, point)
        )
        num_top = point.sampling.logprobs
        if num_top is None:
            return RunOutput((token,), prompt_logprobs=prompt)
        own = self._model.logprobs(last, position, token, num_top)
        return RunOutput((token,), (own,), prompt)

    def _prompt_logprobs(self, run: Run) -> tuple[TokenLogprobs, ...]:
        assert run.prompt_logprobs is not None
        last = () if run.next_prompt_token is None else (run.next_prompt_token,)
        targets = (*run.tokens[1:], *last)
        return tuple(
            self._model.logprobs(token, run.start + i, target, run.prompt_logprobs)
            for i, (token, target) in enumerate(zip(run.tokens, targets, strict=False))
        )

    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        raise _no_weights("hidden states")

    def state_pieces(self, tokens: Sequence[int], piece_tokens: int) -> Iterator[torch.Tensor]:
        raise _no_weights("hidden states")

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        raise _no_weights("full distributions")


def _no_weights(what: str) -> CannotRun:
    return CannotRun(f"a twin has no weights, so it has no {what}", fix="use a real server")
