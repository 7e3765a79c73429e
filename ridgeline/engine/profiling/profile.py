"""Prefill and decode steps of a workload on an engine's own parts, timed operator by operator.

The scheduler plans, the runner computes, the scheduler commits and texts are made, as in `loop.py`.
Passes with timed operators and passes without take turns, so that what the timing itself costs can
be told, and a machine that slows down slows both. Requests are greedy; their prompts are random,
so that no prefix is found in the cache.
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
from ridgeline.engine.tokenization.events import EventTexts
from ridgeline.errors import BadInput, CannotRun, DoesNotFit
from ridgeline.records import (
    OperatorTime,
    PhaseProfile,
    ProfiledPhase,
    Request,
    Sampling,
    StepProfile,
)

WARM, FEWEST = 2, 3
SPARE = 8  # tokens of a sequence beyond those that are timed
PATIENCE = 100  # steps in which a policy may wait

Read = Callable[[], dict[str, OperatorTime]]


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: one prompt of `prompt` tokens, then `batch` sequences that decode from `context`
    tokens on. At most `passes` of each kind, and `limit_s` seconds of a phase once there are three;
    one of each kind where a single one takes longer than that.
    """

    prompt: int
    batch: int
    context: int
    passes: int = 15
    limit_s: float = 8.0
    seed: int = 0

    def decode_tokens(self, step_tokens: int) -> int:
        """What a sequence comes to, at most: one that is first decodes while the prompts of the
        others are computed, so many tokens a step."""
        left_for_prompts = max(1, step_tokens - self.batch)
        waited = -(-(self.batch - 1) * self.context // left_for_prompts)
        return self.context + waited + 2 * self.passes + SPARE


class Driver:
    """An engine's parts, driven step by step on this thread."""

    def __init__(self, parts: EngineParts, vocab_size: int, seed: int = 0) -> None:
        self.parts, self.now_s = parts, 0.0
        self._vocab, self._random = vocab_size, torch.Generator().manual_seed(seed)
        self.texts, self._num_requests = EventTexts(parts.tokenizer, lambda *_: []), 0

    def add(self, num_tokens: int, max_tokens: int | None) -> str:
        """A greedy sequence with a random prompt; `max_tokens` None: it decodes for ever."""
        drawn = torch.randint(3, self._vocab, (num_tokens,), generator=self._random)
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._num_requests += 1
        request_id = f"profiled-{self._num_requests}"
        request = Request(
            id=request_id, prompt=tuple(drawn.tolist()), sampling=sampling, arrival_s=self.now_s
        )
        self.texts.begin(request)
        self.parts.scheduler.add(request)
        return request_id

    def end(self, request_id: str) -> None:
        self.parts.scheduler.cancel(request_id, self.now_s)

    def step(self) -> StepPlan:
        self.now_s += 1.0
        scheduler = self.parts.scheduler
        plan = scheduler.plan(self.now_s)
        result = self.parts.runner.run(plan)
        self.texts.put(scheduler.commit(plan, result, self.now_s))
        return plan

    def decoding(self, batch: int, context: int) -> list[str]:
        """So many sequences with their prompts computed. CannotRun where they never run at once."""
        ids = [self.add(context, None) for _ in range(batch)]
        for _ in range(batch * context + PATIENCE):
            runs = self.step().runs
            if len(runs) == batch and all(len(run.tokens) == 1 for run in runs):
                return ids
        raise CannotRun(
            "the scheduler never ran the sequences at once",
            value=batch,
            limit="blocks for each, and for each that runs one to grow into when another joins",
            fix="raise --kv-cache-memory-bytes, or profile fewer or shorter sequences",
        )


def profile(
    parts: EngineParts,
    resolved: ResolvedSettings,
    options: ProfileOptions,
    clock: Clock = time.perf_counter,
) -> tuple[PhaseProfile, ...]:
    """Prefill, then decode. Raises BadInput, DoesNotFit or CannotRun before the first step."""
    check(resolved, options)
    torch.set_num_threads(resolved.num_threads)
    driver = Driver(parts, resolved.spec.vocab_size, options.seed)
    runner = _Runner(driver, Stopwatch(clock), options)
    return runner.prefill(), runner.decode()


def check(resolved: ResolvedSettings, options: ProfileOptions) -> None:
    """What was asked for must fit, all of it at once."""
    decode_tokens = options.decode_tokens(resolved.max_num_batched_tokens)
    longest = max(options.prompt + 1, decode_tokens)
    if longest > resolved.max_model_len:
        raise BadInput(
            "the profiled sequences are longer than the model takes",
            value=longest,
            limit=resolved.max_model_len,
            fix="raise --max-model-len, or profile shorter ones",
        )
    if options.batch > resolved.max_num_seqs:
        raise BadInput(
            "more sequences than run at once",
            value=options.batch,
            limit=resolved.max_num_seqs,
            fix=f"--max-num-seqs {options.batch}",
        )
    blocks = options.batch * -(-decode_tokens // resolved.block_size)
    if blocks > resolved.num_blocks:
        raise DoesNotFit(
            "the KV cache does not hold the profiled sequences",
            value=f"{blocks} blocks",
            limit=f"{resolved.num_blocks} blocks",
            fix="raise --kv-cache-memory-bytes, or profile fewer or shorter sequences",
        )
    if resolved.speculative_config is not None:
        raise CannotRun(
            "plain steps are profiled: a drafter would hide in them",
            value="--speculative-config",
            fix="leave it out (ridgeline bench tells what speculation gains)",
        )


class _Runner:
    def __init__(self, driver: Driver, watch: Stopwatch, options: ProfileOptions) -> None:
        self.driver, self.watch, self.options = driver, watch, options

    def prefill(self) -> PhaseProfile:
        """A pass is one prompt with all its steps."""

        def one(read: Read | None) -> tuple[StepProfile, ...]:
            self.driver.add(self.options.prompt, 1)
            steps = []
            while self.driver.parts.scheduler.has_work:
                steps.append(self._step(read))
            return tuple(steps)

        return self._phase("prefill", one)

    def decode(self) -> PhaseProfile:
        """A pass is one step of all sequences."""
        ids = self.driver.decoding(self.options.batch, self.options.context)
        found = self._phase("decode", lambda read: (self._step(read),))
        for request_id in ids:
            self.driver.end(request_id)
        return found

    def _phase(
        self, phase: ProfiledPhase, one: Callable[[Read | None], tuple[StepProfile, ...]]
    ) -> PhaseProfile:
        """Passes with and without timed operators, in turns. A long pass warms itself: what the
        first moments of it cost too much does not show in it."""
        plain: list[float] = []
        timed: list[tuple[StepProfile, ...]] = []
        fewest = FEWEST
        until_s = self.watch.clock() + self.options.limit_s
        for _ in range(WARM):
            took_s = _seconds(one(None))
            if took_s > self.options.limit_s:
                plain.append(took_s)
                fewest = 1
                break
        while len(timed) < self.options.passes:
            if len(timed) >= fewest and self.watch.clock() > until_s:
                break
            if len(plain) == len(timed):
                plain.append(_seconds(one(None)))
            with operators_timed(self.driver.parts.runner, self.watch) as read:
                timed.append(one(read))
        return PhaseProfile(phase=phase, passes=tuple(timed), plain_s=tuple(plain))

    def _step(self, read: Read | None) -> StepProfile:
        begun = self.watch.clock()
        plan = self.driver.step()
        took_s = self.watch.clock() - begun
        return StepProfile(
            shapes=shapes_of(plan),
            num_sampled=sum(run.sample is not None for run in plan.runs),
            time_s=took_s,
            operators={} if read is None else read(),
        )


def _seconds(steps: tuple[StepProfile, ...]) -> float:
    return sum(step.time_s for step in steps)
