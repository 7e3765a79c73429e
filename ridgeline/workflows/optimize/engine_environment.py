"""The environment of an optimisation of Ridgeline's own engine: engines in this process, the probe,
and the simulator.

Two engines may be open at once, but only one is loaded at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.engine.engine import Engine
from ridgeline.engine.tokenization import NoTokenizer, Tokenizer, load_tokenizer
from ridgeline.hardware.machine import Machine
from ridgeline.measure.client.engine_target import EngineTarget
from ridgeline.measure.client.load_client import OnFinish, run_load
from ridgeline.measure.monitors.machine_load import LoadMeter
from ridgeline.measure.workload import LoadRequest, Workload
from ridgeline.optimize import quality
from ridgeline.optimize.environment import (
    ContextSource,
    Deployment,
    Environment,
    Load,
    LongContexts,
    top_two_margin,
)
from ridgeline.optimize.quality import Array
from ridgeline.records import EngineInfo, RunTrace, Sampling, Token
from ridgeline.workflows.configuration_costs import ConfigurationCosts, base_facts
from ridgeline.workflows.evaluate.heldout_text import heldout_windows, quality_tasks
from ridgeline.workflows.evaluate.long_contexts import (
    EngineContexts,
    context_tokens,
    recall_texts,
    texts_to_continue,
)
from ridgeline.workflows.load.tokenized_workload import (
    NUM_PROFILED,
    TokenizedWorkload,
    check_prompts,
    prompt_of,
    sample_requests,
    traffic_profile,
)
from ridgeline.workflows.optimize.calibrated_step_times import (
    CalibratedStepTimes,
    require_calibrated,
)
from ridgeline.workflows.optimize.quantized_candidates import weight_maker
from ridgeline.workflows.optimize.simulator import SimulatedEngine


def engine_environment(
    settings: Settings,
    workload: Workload,
    machine: Machine,
    step_times: CalibratedStepTimes | None = None,
) -> Environment:
    """Everything that the search needs for one model on this machine.

    `step_times`: predict with a calibration of this machine. Raises UserError if the workload does
    not fit the model, or the calibration does not cover it.
    """
    if step_times is not None:
        require_calibrated(step_times, settings)
    tokenizer = load_tokenizer(settings.model)
    tokenized = TokenizedWorkload(workload, tokenizer)
    costs = ConfigurationCosts(machine)
    sample = sample_requests(tokenized, costs.resolved(settings).max_model_len)
    spec, (_, size) = costs.resolved(settings).spec, quality.load_quality_limits()
    return Environment(
        open=lambda chosen: _open(chosen, tokenized),
        simulator=SimulatedEngine(costs.bounds, costs.scheduler, tokenized.requests, step_times),
        price_of=costs.price,
        peaks_of=costs.peaks,
        facts=base_facts(machine, costs, settings, sample),
        heldout=()
        if isinstance(tokenizer, NoTokenizer)
        else heldout_windows(tokenizer, size.window_tokens),
        tasks=quality_tasks(tokenizer),
        long_contexts=_long_contexts(tokenizer, sample, costs.resolved(settings).max_model_len),
        make=weight_maker(tokenized, tokenizer),
        check_prompts=check_prompts(sample),
        traffic=traffic_profile(list(tokenized.sample(NUM_PROFILED, 0))),
        longest_output=max(request.max_tokens for request in sample),
        vocab_size=spec.vocab_size,
    )


def _long_contexts(
    tokenizer: Tokenizer, sample: Sequence[LoadRequest], max_model_len: int
) -> LongContexts | None:
    """Contexts as long as the workload's; None for a model without a tokenizer."""
    if isinstance(tokenizer, NoTokenizer):
        return None
    longest = context_tokens(max(len(prompt_of(request)) for request in sample), max_model_len)

    def source_of(deployment: Deployment) -> ContextSource:
        assert isinstance(deployment, EngineDeployment)
        return EngineContexts(deployment.engine)

    return LongContexts(
        texts=texts_to_continue(tokenizer, longest),
        recall=recall_texts(tokenizer, longest),
        source_of=source_of,
    )


@contextmanager
def _open(settings: Settings, workload: TokenizedWorkload) -> Iterator[Deployment]:
    with Engine.from_settings(settings) as engine:
        yield EngineDeployment(engine, workload)


class EngineDeployment:
    """An open engine, as the search sees it."""

    def __init__(self, engine: Engine, workload: TokenizedWorkload) -> None:
        self.engine, self._workload = engine, workload
        self._target = EngineTarget(engine)

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    async def run(self, load: Load, on_finish: OnFinish | None = None) -> RunTrace:
        """Measure one run under Poisson arrivals."""
        arrivals, options = load.poisson()
        meter = LoadMeter()
        run = await run_load(self._target, self._workload, arrivals, options, on_finish=on_finish)
        return msgspec.structs.replace(run, machine_load=meter.read())

    async def greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[tuple[int, ...]]:
        """Greedy continuations of all prompts, batched together."""
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return await asyncio.gather(*(self._tokens(prompt, sampling) for prompt in prompts))

    def margin(self, prompt: Sequence[int], output: Sequence[int], place: int) -> float:
        """Nats between the two most likely tokens at `place` of `output`."""
        return top_two_margin(self.logprobs_of((*prompt, *output[:place])))

    def margin_variation(self) -> float:
        """0: the engine computes a row in the same way in any batch."""
        return 0.0

    def logprobs_of(self, tokens: Sequence[int]) -> Array:
        """[T, V] log-softmax after each of T tokens."""
        return self.engine.logprobs_of(tokens)

    async def _tokens(self, prompt: Sequence[int], sampling: Sampling) -> tuple[int, ...]:
        events = self.engine.stream(prompt, sampling)
        return tuple([event.token async for event in events if isinstance(event, Token)])
