"""Fast path for simulation: apply many decode steps at once, without planning any of them.

Most steps of a simulated engine are steady: every running sequence computes its one pending token,
and nothing else happens. While no request can start, be preempted or expire, the outcome of the
next n steps is known in advance. `count_steady_steps` says how large n is; `apply_steady_steps`
leaves scheduler, block pool and prefix cache exactly as n pairs of plan and commit would, at the
cost of about one. tests/plan/test_fleet.py runs random loads both ways and compares everything.

It relies on what a simulation decides anyway: all sampled tokens are `token`, none of them ends a
sequence, and each request has one choice. Where that does not hold, or the scheduler is not
`is_predictable`, `count_steady_steps` is 0 and the caller plans the step.
"""

from __future__ import annotations

from ridgeline.engine.scheduler.kv.prefix_cache import (
    NoPrefixCache,
    PrefixCache,
    block_digest,
    root_digest,
)
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.records import Event

ALLOCATE, PUBLISH = 0, 1  # in the order of a step: plan allocates blocks, commit publishes them


def count_steady_steps(scheduler: Scheduler) -> int:
    """How many of the next steps only decode; to be called between a commit and the next plan."""
    running, limits = scheduler.running, scheduler.limits
    if not running or len(running) > limits.max_num_batched_tokens:
        return 0
    if scheduler.has_waiting and len(running) < limits.max_num_seqs:
        return 0
    if not scheduler.is_predictable:
        return 0
    steps = min([remaining_tokens(seq, limits.max_model_len) for seq in running])
    return _limit_by_blocks(scheduler, steps) if steps > 0 else 0


def remaining_tokens(seq: Sequence, max_model_len: int) -> int:
    """Tokens until the sequence ends.

    0 where that cannot be known, where the sequence has more than one token to compute, or where
    its next token is the first one, which needs its own event.
    """
    known, num_prompt = len(seq.tokens), seq.num_prompt
    if known - seq.num_computed != 1 or known == num_prompt or not ends_at_length(seq):
        return 0
    free, max_tokens = max_model_len - known, seq.sampling.max_tokens
    return free if max_tokens is None else min(free, max_tokens - known + num_prompt)


def ends_at_length(seq: Sequence) -> bool:
    """Whether the sequence has no siblings and ends only at a length."""
    sampling = seq.sampling
    return (
        sampling.n == 1
        and sampling.ignore_eos
        and not sampling.stop_token_ids
        and seq.num_prompt_logprobs is None
    )


def _limit_by_blocks(scheduler: Scheduler, steps: int) -> int:
    """The largest number of steps, up to `steps`, for which the idle blocks suffice."""
    size, running = scheduler.pool.block_size, scheduler.running
    available = scheduler.pool.num_idle + sum([len(seq.blocks) for seq in running])

    def fits(steps: int) -> bool:
        return sum([-(-(seq.num_computed + steps) // size) for seq in running]) <= available

    if fits(steps):
        return steps
    low, high = 0, steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def apply_steady_steps(
    scheduler: Scheduler, num_steps: int, now_s: float, token: int, *, all_steps: bool = True
) -> list[Event]:
    """Apply `num_steps` decode steps that all sample `token`; the last commit is at `now_s`.

    `num_steps` must not exceed `count_steady_steps`. Returns the Finished events. A sequence can
    only end with the last of all steady steps: `all_steps` False says that there are more.
    """
    running = scheduler.running
    if isinstance(scheduler.cache, NoPrefixCache):
        _decode(scheduler, [token] * num_steps)
    else:
        _decode_and_publish(scheduler, [token] * num_steps, now_s)
    num_tokens = num_steps * len(running)
    scheduler.record_steps(now_s, num_steps, num_tokens, num_tokens)
    if not all_steps:
        return []
    limit = scheduler.limits.max_model_len
    events: list[Event] = []
    for seq in [seq for seq in running if not remaining_tokens(seq, limit)]:
        events += scheduler.finish(seq.request.id, seq.index, "length", now_s=now_s)
    return events


def _decode(scheduler: Scheduler, tokens: list[int]) -> None:
    """Without a prefix cache it does not matter which sequence gets which block."""
    pool, size = scheduler.pool, scheduler.pool.block_size
    for seq in scheduler.running:
        seq.tokens += tokens
        computed = seq.num_computed = seq.num_computed + len(tokens)
        needed = -(-computed // size) - len(seq.blocks)
        if needed > 0:
            seq.blocks += pool.allocate_many(needed)


def _decode_and_publish(scheduler: Scheduler, tokens: list[int], now_s: float) -> None:
    """Allocate and publish blocks in the order in which the single steps would."""
    pool, num_steps, running = scheduler.pool, len(tokens), scheduler.running
    size, computed_before = pool.block_size, [seq.num_computed for seq in running]
    actions: list[tuple[int, int, int]] = []  # (step, ALLOCATE or PUBLISH, place in running)
    for place, seq in enumerate(running):
        seq.tokens += tokens
        next_block = (
            len(seq.blocks) * size - seq.num_computed
        )  # first step that needs another block
        actions += [(step, ALLOCATE, place) for step in range(next_block, num_steps, size)]
        block_full = size - seq.num_computed % size - 1  # first step that fills a block
        actions += [(step, PUBLISH, place) for step in range(block_full, num_steps, size)]
    actions.sort()
    for step, action, place in actions:
        seq = running[place]
        if action == ALLOCATE:
            seq.blocks.append(pool.allocate())
        else:
            seq.num_computed = computed_before[place] + step + 1
            scheduler.cache.publish(seq, now_s)
    for computed, seq in zip(computed_before, running, strict=True):
        seq.num_computed = computed + num_steps


def insert_transferred_kv(
    scheduler: Scheduler, prompt: tuple[int, ...], tenant: str, now_s: float
) -> int:
    """Put the KV of a prompt computed by another engine into the prefix cache.

    The request that follows hits these blocks, unless others need them first. Inserts as many
    full blocks (of every group of layers) as are idle; returns their number, 0 without a cache.
    """
    pool, cache = scheduler.pool, scheduler.cache
    if not isinstance(cache, PrefixCache):
        return 0
    layout = scheduler.limits.kv_layout
    num_places = min((len(prompt) - 1) // pool.block_size, pool.num_idle // layout.num_groups)
    first = (
        layout.first_place(num_places * pool.block_size, pool.block_size) if layout.windowed else 0
    )
    blocks: list[int] = []
    digest = root_digest(tenant)
    for i in range(num_places):
        digest = block_digest(digest, prompt[i * pool.block_size : (i + 1) * pool.block_size])
        for group in range(layout.num_groups):
            if i >= first or (layout.full and group == 0):
                blocks.append(pool.allocate())
                cache.insert(digest, blocks[-1], now_s, group)
    pool.release_all(blocks)
    return num_places
