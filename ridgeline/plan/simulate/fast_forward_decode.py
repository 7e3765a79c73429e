"""Many steps at once, for whoever drives the scheduler on a virtual clock.

Most steps of a simulated engine are calm: every running sequence computes its one pending token and
nothing else happens. Nobody can join, be preempted or expire, and nobody ends before the last of
them, so the outcome of the next n steps is known beforehand. `calm_steps` says how large n is, and
`leap` leaves scheduler, block pool and prefix cache exactly as n pairs of plan and commit would
have, at the cost of about one. The
proof is a test over random loads: tests/plan/test_fleet.py drives both ways and compares all that
is told.

A leap assumes what a simulation decides anyway: that the sampled tokens are all `token`, that no
end-of-sequence token is among them, one choice per request, no drafts, nobody in the background lane,
and no time to live in the prefix cache.
Anything else makes `calm_steps` 0, and the caller goes step by step.
"""

from __future__ import annotations

import math

from ridgeline.engine.scheduler.kv.prefix_cache import (
    NoPrefixCache,
    PrefixCache,
    block_digest,
    root_digest,
)
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.engine.scheduler.speculation.base import NoDrafts
from ridgeline.records import Event

TAKE, PUBLISH = 0, 1  # blocks are taken by plan, published by commit


def calm_steps(scheduler: Scheduler) -> int:
    """How many of the next steps are calm; to be asked between a commit and the next plan."""
    registry, limits = scheduler._registry, scheduler.limits
    running = registry.running
    if not running or len(running) > limits.max_num_batched_tokens:
        return 0
    if registry.lanes[0].has_waiting and len(running) < limits.max_num_seqs:
        return 0
    if not runs_plainly(scheduler):
        return 0
    most = min([num_left(seq, limits.max_model_len) for seq in running])
    return _with_blocks(scheduler, running, most) if most > 0 else 0


def runs_plainly(scheduler: Scheduler) -> bool:
    """Nobody in the background, no drafts, nothing to be told or to expire."""
    background = scheduler._registry.lanes[1]
    return not (
        background.num_running
        or background.has_waiting
        or scheduler._events
        or scheduler._deadlines.next_s is not None
        or not isinstance(scheduler.draft_scheduler._proposer, NoDrafts)
        or getattr(scheduler.cache, "_ttl_s", math.inf) != math.inf
    )


def num_left(seq: Sequence, max_model_len: int) -> int:
    """Tokens until the sequence ends; 0 where that or its next step is not foreseeable, or where
    the step tells something: a first token."""
    known, num_prompt = len(seq.tokens), seq.num_prompt
    if known - seq.num_computed != 1 or known == num_prompt or not foreseeable(seq):
        return 0
    room, wanted = max_model_len - known, seq.group.request.sampling.max_tokens
    return room if wanted is None else min(room, wanted - known + num_prompt)


def foreseeable(seq: Sequence) -> bool:
    """One choice, which ends at a length and nowhere else."""
    sampling = seq.group.request.sampling
    return (
        sampling.n == 1
        and sampling.ignore_eos
        and not sampling.stop_token_ids
        and seq.num_prompt_logprobs is None
    )


def _with_blocks(scheduler: Scheduler, running: list[Sequence], most: int) -> int:
    """The most steps for which the idle blocks last."""
    size, idle = scheduler.pool.block_size, scheduler.pool.num_idle
    owned = sum([len(seq.blocks) for seq in running])

    def lasts(steps: int) -> bool:
        needed = sum([-(-(seq.num_computed + steps) // size) for seq in running])
        return needed - owned <= idle

    if lasts(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if lasts(middle) else (low, middle)
    return low


def leap(
    scheduler: Scheduler, num_steps: int, now_s: float, token: int, *, all_calm: bool = True
) -> list[Event]:
    """As `num_steps` pairs of plan and commit that all sample `token`; at most `calm_steps`.

    `now_s`: the instant of the last of these commits. Returns who ended with it; nobody can unless
    these are `all_calm` steps that there were.
    """
    running = scheduler._registry.running
    if isinstance(scheduler.cache, NoPrefixCache):
        _decode(scheduler, running, [token] * num_steps)
    else:
        _decode_published(scheduler, running, [token] * num_steps, now_s)
    totals = scheduler.totals
    totals.num_steps += num_steps
    totals.num_tokens += num_steps * len(running)
    totals.num_sampled += num_steps * len(running)
    scheduler._now_s = now_s
    if not all_calm:
        return []
    most = scheduler.limits.max_model_len
    ended = [seq for seq in running if not num_left(seq, most)]
    return [scheduler._finish(seq, "length", None, now_s) for seq in ended]


def _decode(scheduler: Scheduler, running: list[Sequence], more: list[int]) -> None:
    """Blocks sequence by sequence: without a prefix cache it does not matter who has which."""
    pool, size, num_steps = scheduler.pool, scheduler.pool.block_size, len(more)
    for seq in running:
        seq.tokens += more
        computed = seq.num_computed = seq.num_computed + num_steps
        needed = -(-computed // size) - len(seq.blocks)
        if needed > 0:
            seq.blocks += pool.allocate_many(needed)


def _decode_published(
    scheduler: Scheduler, running: list[Sequence], more: list[int], now_s: float
) -> None:
    """Blocks are taken and published in the order in which the steps would."""
    pool, num_steps = scheduler.pool, len(more)
    size, bases = pool.block_size, [seq.num_computed for seq in running]
    turns: list[tuple[int, int, int]] = []  # (step, TAKE or PUBLISH, place)
    for place, seq in enumerate(running):
        seq.tokens += more
        first = len(seq.blocks) * size - seq.num_computed  # the step that needs a block more
        turns += [(step, TAKE, place) for step in range(first, num_steps, size)]
        full = size - seq.num_computed % size - 1  # the step that fills a block
        turns += [(step, PUBLISH, place) for step in range(full, num_steps, size)]
    turns.sort()
    for step, what, place in turns:
        seq = running[place]
        if what == TAKE:
            seq.blocks.append(pool.allocate())
        else:
            seq.num_computed = bases[place] + step + 1
            scheduler.cache.publish(seq, now_s)
    for base, seq in zip(bases, running, strict=True):
        seq.num_computed = base + num_steps


def implant(scheduler: Scheduler, prompt: tuple[int, ...], tenant: str, now_s: float) -> int:
    """Put the KV of a prompt computed elsewhere into the prefix cache, as far as blocks are idle.

    What a KV transfer between engines does. The blocks are cached ones: they are hit by the request
    that follows, unless others need them first. Returns how many blocks were put.
    """
    pool, cache = scheduler.pool, scheduler.cache
    if not isinstance(cache, PrefixCache):
        return 0
    num_blocks = min((len(prompt) - 1) // pool.block_size, pool.num_idle)
    taken: list[int] = []
    parent = root_digest(tenant)
    for i in range(num_blocks):
        parent = block_digest(parent, prompt[i * pool.block_size : (i + 1) * pool.block_size])
        taken.append(pool.allocate())
        cache.insert(parent, taken[-1], now_s)
    pool.release_all(taken)
    return num_blocks
