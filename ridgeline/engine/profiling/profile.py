"""Profiles prefill and decode steps on an engine's own parts, operator by operator.

Steps run as in the engine: the scheduler plans, the runner computes, the scheduler commits, and
texts are produced. Passes with and without operator timing alternate, so that the overhead of the
timing is known and a machine that slows down slows both. Requests are greedy with random prompts,
so that the prefix cache finds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch

from ridgeline.engine.build import EngineParts
from ridgeline.engine.config import ResolvedSettings
from ridgeline.engine.profiling.operator_timer import Clock, Stopwatch, operators_timed
from ridgeline.engine.profiling.step_stats import shapes_of
from ridgeline.engine.scheduler.plan import StepPlan
from ridgeline.engine.tokenization.event_texts import EventTexts
from ridgeline.errors import BadInput, CannotRun, DoesNotFit
from ridgeline.modelspec.cost.kv_layout import kv_layout
from ridgeline.records import (
    OperatorTime,
    PhaseProfile,
    ProfiledPhase,
    Request,
    Sampling,
    StepProfile,
)

WARMUP_PASSES, MIN_PASSES = 2, 3
SPARE_TOKENS = 8  # of a sequence, beyond those that are timed
MAX_IDLE_STEPS = 100  # steps for which a batching policy may wait

Read = Callable[[], dict[str, OperatorTime]]


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to profile: a prompt of `prompt` tokens, then `batch` decodes from `context`.

    Each phase runs at most `passes` passes of each kind, and at most `limit_s` seconds once there
    are three of each; if a single pass takes longer than that, one of each.
    """

    prompt: int
    batch: int
    context: int
    passes: int = 15
    limit_s: float = 8.0
    seed: int = 0

    def decode_tokens(self, step_tokens: int) -> int:
        """The longest a sequence becomes, given `step_tokens` per step.

        The first one already decodes while the other prompts are computed.
        """
        left_for_prompts = max(1, step_tokens - self.batch)
        waited = -(-(self.batch - 1) * self.context // left_for_prompts)
        return self.context + waited + 2 * self.passes + SPARE_TOKENS


class StepDriver:
    """Drives an engine's parts step by step on the calling thread."""

    def __init__(self, parts: EngineParts, vocab_size: int, seed: int = 0) -> None:
        self.parts, self.now_s = parts, 0.0
        self._vocab_size, self._random = vocab_size, torch.Generator().manual_seed(seed)
        self.texts, self._num_requests = EventTexts(parts.tokenizer, lambda *_: []), 0

    def add(self, num_tokens: int, max_tokens: int | None) -> str:
        """Add a greedy request with a random prompt and return its id.

        With `max_tokens` None it decodes until `end` is called.
        """
        prompt = torch.randint(3, self._vocab_size, (num_tokens,), generator=self._random)
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._num_requests += 1
        request_id = f"profiled-{self._num_requests}"
        request = Request(
            id=request_id, prompt=tuple(prompt.tolist()), sampling=sampling, arrival_s=self.now_s
        )
        self.texts.begin(request)
        self.parts.scheduler.add(request)
        return request_id

    def end(self, request_id: str) -> None:
        """Cancel a request."""
        self.parts.scheduler.cancel(request_id, self.now_s)

    def step(self) -> StepPlan:
        """Perform one step and return its plan."""
        self.now_s += 1.0
        scheduler = self.parts.scheduler
        plan = scheduler.plan(self.now_s)
        result = self.parts.runner.run(plan)
        self.texts.add_texts(scheduler.commit(plan, result, self.now_s))
        return plan

    def start_decoding(self, batch: int, context: int) -> list[str]:
        """Add `batch` requests and compute their prompts; returns their ids.

        Raises CannotRun if the scheduler never runs them all at once.
        """
        ids = [self.add(context, None) for _ in range(batch)]
        for _ in range(batch * context + MAX_IDLE_STEPS):
            runs = self.step().runs
            if len(runs) == batch and all(len(run.tokens) == 1 for run in runs):
                return ids
        raise CannotRun(
            "the scheduler never ran all sequences at once",
            value=batch,
            limit="blocks for each, plus one to grow into for each running one at an admission",
            fix="raise --kv-cache-memory-bytes, or profile fewer or shorter sequences",
        )


def profile(
    parts: EngineParts,
    resolved: ResolvedSettings,
    options: ProfileOptions,
    clock: Clock = time.perf_counter,
) -> tuple[PhaseProfile, ...]:
    """Profile prefill, then decode.

    Raises BadInput, DoesNotFit or CannotRun before the first step.
    """
    check_options(resolved, options)
    torch.set_num_threads(resolved.num_threads)
    driver = StepDriver(parts, resolved.spec.vocab_size, options.seed)
    profiler = _Profiler(driver, Stopwatch(clock), options)
    return profiler.prefill(), profiler.decode()


def check_options(resolved: ResolvedSettings, options: ProfileOptions) -> None:
    """Raise an error unless the engine can run all that the options ask for at once."""
    decode_tokens = options.decode_tokens(resolved.max_num_batched_tokens)
    longest = max(options.prompt + 1, decode_tokens)
    if longest > resolved.max_model_len:
        raise BadInput(
            "the profiled sequences are longer than the model's context",
            value=longest,
            limit=resolved.max_model_len,
            fix="raise --max-model-len, or profile shorter sequences",
        )
    if options.batch > resolved.max_num_seqs:
        raise BadInput(
            "the profiled batch has more sequences than --max-num-seqs",
            value=options.batch,
            limit=resolved.max_num_seqs,
            fix=f"--max-num-seqs {options.batch}",
        )
    layout, run_tokens = kv_layout(resolved.spec), resolved.max_num_batched_tokens
    blocks = options.batch * layout.max_blocks(decode_tokens, resolved.block_size, run_tokens)
    if blocks > resolved.num_blocks:
        raise DoesNotFit(
            "the KV cache cannot hold the profiled sequences",
            value=f"{blocks} blocks",
            limit=f"{resolved.num_blocks} blocks",
            fix="raise --kv-cache-memory-bytes, or profile fewer or shorter sequences",
        )
    if resolved.speculative_config is not None:
        raise CannotRun(
            "profiling cannot separate the drafter's time from the step's",
            value="--speculative-config",
            fix="leave it out (ridgeline bench shows what speculation gains)",
        )


class _Profiler:
    def __init__(self, driver: StepDriver, watch: Stopwatch, options: ProfileOptions) -> None:
        self.driver, self.watch, self.options = driver, watch, options

    def prefill(self) -> PhaseProfile:
        """One pass is one prompt with all of its steps."""

        def run_pass(read: Read | None) -> tuple[StepProfile, ...]:
            self.driver.add(self.options.prompt, 1)
            steps = []
            while self.driver.parts.scheduler.has_work:
                steps.append(self._step(read))
            return tuple(steps)

        return self._phase("prefill", run_pass)

    def decode(self) -> PhaseProfile:
        """One pass is one step of all sequences."""
        ids = self.driver.start_decoding(self.options.batch, self.options.context)
        profile = self._phase("decode", lambda read: (self._step(read),))
        for request_id in ids:
            self.driver.end(request_id)
        return profile

    def _phase(
        self, phase: ProfiledPhase, run_pass: Callable[[Read | None], tuple[StepProfile, ...]]
    ) -> PhaseProfile:
        """Alternate passes with and without operator timing."""
        plain: list[float] = []
        timed: list[tuple[StepProfile, ...]] = []
        min_passes = MIN_PASSES
        until_s = self.watch.clock() + self.options.limit_s
        for _ in range(WARMUP_PASSES):
            took_s = _seconds(run_pass(None))
            if took_s > self.options.limit_s:
                # A pass this long needs no warm-up: a slow start does not show in it.
                plain.append(took_s)
                min_passes = 1
                break
        while len(timed) < self.options.passes:
            if len(timed) >= min_passes and self.watch.clock() > until_s:
                break
            if len(plain) == len(timed):
                plain.append(_seconds(run_pass(None)))
            with operators_timed(self.driver.parts.runner, self.watch) as read:
                timed.append(run_pass(read))
        return PhaseProfile(phase=phase, passes=tuple(timed), plain_s=tuple(plain))

    def _step(self, read: Read | None) -> StepProfile:
        begun = self.watch.clock()
        plan = self.driver.step()
        took_s = self.watch.clock() - begun
        operators = {} if read is None else read()
        if operators and self.driver.parts.runner.decoder.device.type == "cuda":
            took_s = sum(own.time_s for own in operators.values())
        return StepProfile(
            shapes=shapes_of(plan),
            num_sampled=sum(run.sample is not None for run in plan.runs),
            time_s=took_s,
            operators=operators,
        )


def _seconds(steps: tuple[StepProfile, ...]) -> float:
    return sum(step.time_s for step in steps)
