"""Fast path for simulation: apply a step that starts every waiting request, without planning it.

After steady decode steps (`fast_forward_decode`) this is the most common step of a simulated
engine: all running sequences decode one token, and all waiting requests fit, so that their whole
prompts are computed in the same step. `begin_admission_step` does what plan would and
`commit_admission_step` what commit would, but without runs, samples, or an event per decoded token.

It makes the same assumptions as the decode path, and needs a batching policy that admits whatever
fits, no prefix cache, and no preempted request waiting. Where one of these does not hold, or slots,
token budget or blocks do not suffice for every waiting request, `begin_admission_step` returns None
and changes nothing: the caller then plans the step. tests/plan/test_fleet.py compares both ways.
"""

from __future__ import annotations

from ridgeline.engine.scheduler.kv.prefix_cache import NoPrefixCache
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.plan.simulate.fast_forward_decode import ends_at_length, remaining_tokens
from ridgeline.records import Event, Started, Token

Shapes = list[tuple[int, int]]


class AdmissionStep:
    """A step under way that started at `at_s`; `shapes` are those of its plan."""

    __slots__ = ("at_s", "decoding", "shapes", "started")

    def __init__(self, decoding: list[Sequence], started: list[Sequence], at_s: float) -> None:
        self.decoding, self.started, self.at_s = decoding, started, at_s
        self.shapes: Shapes = [(1, seq.num_computed) for seq in decoding]
        self.shapes += [(seq.num_prompt, 0) for seq in started]


def begin_admission_step(scheduler: Scheduler, now_s: float) -> AdmissionStep | None:
    """Start every waiting request; None, and nothing is changed, where not all of them can."""
    if not scheduler.has_waiting or not scheduler.is_predictable:
        return None
    waiting, running = scheduler.next_admissions(), scheduler.running
    if waiting is None or not isinstance(scheduler.cache, NoPrefixCache):
        return None
    limits = scheduler.limits
    num_tokens = len(running) + sum([seq.num_prompt for seq in waiting])
    if num_tokens > limits.max_num_batched_tokens:
        return None
    if len(running) + len(waiting) > limits.max_num_seqs:
        return None
    if not all(remaining_tokens(seq, limits.max_model_len) for seq in running):
        return None
    if not all(map(ends_at_length, waiting)):
        return None
    size = scheduler.pool.block_size
    needed = [-(-(seq.num_computed + 1) // size) for seq in running]
    if not _have_blocks(scheduler, needed, waiting):
        return None
    scheduler.background_budget.begin_step(now_s)
    for seq, num_blocks in zip(running, needed, strict=True):
        if num_blocks > len(seq.blocks):
            seq.blocks.append(scheduler.pool.allocate())
    step = AdmissionStep(running.copy(), scheduler.start_waiting(len(waiting)), now_s)
    scheduler.record_steps(now_s, num_steps=1)
    return step


def commit_admission_step(
    scheduler: Scheduler, step: AdmissionStep, now_s: float, token: int
) -> list[Event]:
    """End the step: Started events, first tokens, and the sequences that finished with it."""
    limit = scheduler.limits.max_model_len
    num_tokens, num_sampled = sum([new for new, _ in step.shapes]), len(step.shapes)
    scheduler.record_steps(now_s, 0, num_tokens, num_sampled)
    events: list[Event] = [
        Started(request_id=seq.request.id, at_s=step.at_s, cached_tokens=0) for seq in step.started
    ]
    for seq in step.decoding:
        seq.num_computed += 1
        seq.tokens.append(token)
        if not remaining_tokens(seq, limit):
            events += scheduler.finish(seq.request.id, seq.index, "length", now_s=now_s)
    for seq in step.started:
        seq.num_computed = seq.num_prompt
        seq.tokens.append(token)
        events.append(
            Token(request_id=seq.request.id, index=seq.index, token=token, text="", at_s=now_s)
        )
        if not remaining_tokens(seq, limit):
            events += scheduler.finish(seq.request.id, seq.index, "length", now_s=now_s)
    return events


def _have_blocks(scheduler: Scheduler, needed: list[int], waiting: list[Sequence]) -> bool:
    """Whether there are blocks for all, as planning counts them.

    Decodes come first; each request that starts leaves one idle block per running sequence.
    """
    pool, num_running = scheduler.pool, len(scheduler.running)
    idle = pool.num_idle - sum(needed) + sum([len(seq.blocks) for seq in scheduler.running])
    for seq in waiting:
        blocks = -(-seq.num_prompt // pool.block_size)
        if blocks + num_running > idle:
            return False
        idle -= blocks
        num_running += 1
    return True
