"""A step in which requests join, for whoever drives the scheduler on a virtual clock: foreseen, too.

Beside calm steps (`leap.py`) the commonest step of a simulated engine is this one: everybody who
runs decodes one token, and everybody who waits has room, so that the whole prompts are computed in
the same step. Its outcome is as certain as that of a calm one. `enter` does what `plan` would, and
`entered` what `commit` would, without runs, samples and a token's event for each who only decodes.

The same assumptions as in `leap.py`, and no prefix cache, no policy that waits for a batch, nobody
who returns after a preemption. `enter` changes nothing and says None where one of them does not
hold, or where seats, budget or blocks are short of any one who waits: then the step is planned.
tests/plan/test_fleet.py drives both ways and compares.
"""

from __future__ import annotations

from operator import attrgetter

from ridgeline.engine.scheduler.batching.continuous import ContinuousBatching
from ridgeline.engine.scheduler.kv.prefix_cache import NoPrefixCache
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.plan.simulate.fast_forward_decode import foreseeable, num_left, runs_plainly
from ridgeline.records import Event, Started, Token

_KEY = attrgetter("key")
Shapes = list[tuple[int, int]]


class Entry:
    """A step under way: `decoding` and `joining` as they were seated; `shapes` as in its plan."""

    __slots__ = ("at_s", "decoding", "joining", "shapes")

    def __init__(self, decoding: list[Sequence], joining: list[Sequence], at_s: float) -> None:
        self.decoding, self.joining, self.at_s = decoding, joining, at_s
        self.shapes: Shapes = [(1, seq.num_computed) for seq in decoding]
        self.shapes += [(seq.num_prompt, 0) for seq in joining]


def enter(scheduler: Scheduler, now_s: float) -> Entry | None:
    """Seat everybody who waits, with blocks; None, and nothing is changed, if that is not all."""
    lane, running = scheduler._registry.lanes[0], scheduler._registry.running
    if not len(lane.unstarted) or len(lane.resuming) or not _foreseen(scheduler):
        return None
    limits = scheduler.limits
    waiting = sorted(lane.unstarted._live.values(), key=_KEY)
    num_tokens = len(running) + sum([seq.num_prompt for seq in waiting])
    if num_tokens > limits.max_num_batched_tokens:
        return None
    if len(running) + len(waiting) > limits.max_num_seqs:
        return None
    if not all(num_left(seq, limits.max_model_len) for seq in running):
        return None
    if not all(map(foreseeable, waiting)):
        return None
    wanted = [-(-(seq.num_computed + 1) // scheduler.pool.block_size) for seq in running]
    if not _have_blocks(scheduler, running, wanted, waiting):
        return None
    scheduler.background_budget.begin_step(now_s)
    _grow(scheduler, running, wanted)
    entry = Entry(running.copy(), waiting, now_s)
    for seq in waiting:
        _seat(scheduler, seq)
    scheduler._now_s = now_s
    scheduler.totals.num_steps += 1
    return entry


def entered(scheduler: Scheduler, entry: Entry, now_s: float, token: int) -> list[Event]:
    """The end of the step: who joined, first tokens, and who ended with it."""
    scheduler._now_s = now_s
    num, most = len(entry.decoding) + len(entry.joining), scheduler.limits.max_model_len
    totals = scheduler.totals
    totals.num_tokens += sum([new for new, _ in entry.shapes])
    totals.num_sampled += num
    events: list[Event] = [
        Started(request_id=seq.request.id, at_s=entry.at_s, cached_tokens=0)
        for seq in entry.joining
    ]
    for seq in entry.decoding:
        seq.num_computed += 1
        seq.tokens.append(token)
        if not num_left(seq, most):
            events.append(scheduler._finish(seq, "length", None, now_s))
    for seq in entry.joining:
        seq.num_computed = seq.num_prompt
        seq.tokens.append(token)
        events.append(
            Token(request_id=seq.request.id, index=seq.index, token=token, text="", at_s=now_s)
        )
        if not num_left(seq, most):
            events.append(scheduler._finish(seq, "length", None, now_s))
    return events


def _foreseen(scheduler: Scheduler) -> bool:
    return (
        runs_plainly(scheduler)
        and isinstance(scheduler.cache, NoPrefixCache)
        and isinstance(scheduler._admitter._policy, ContinuousBatching)
    )


def _have_blocks(
    scheduler: Scheduler, running: list[Sequence], wanted: list[int], waiting: list[Sequence]
) -> bool:
    """As planning would ask: decodes first; who joins leaves one for each who is seated."""
    pool, seated = scheduler.pool, len(running)
    idle = pool.num_idle - sum(wanted) + sum([len(seq.blocks) for seq in running])
    for seq in waiting:
        needed = -(-seq.num_prompt // pool.block_size)
        if needed + seated > idle:
            return False
        idle -= needed
        seated += 1
    return True


def _grow(scheduler: Scheduler, running: list[Sequence], wanted: list[int]) -> None:
    for seq, num in zip(running, wanted, strict=True):
        if num > len(seq.blocks):
            seq.blocks.append(scheduler.pool.allocate())


def _seat(scheduler: Scheduler, seq: Sequence) -> None:
    registry, pool = scheduler._registry, scheduler.pool
    popped = registry.lanes[0].unstarted.pop()
    assert popped is seq, "the queue's order and its heap disagree"
    seq.blocks = pool.allocate_many(pool.num_blocks_for(seq.num_prompt))
    registry.activate(seq)
    registry.mark_started(seq.group)
    seq.group.cached_tokens = 0
    scheduler.cache.record_lookup(seq.num_prompt, 0)
