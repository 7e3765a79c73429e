"""Who joins next, and the room that it needs: a seat, blocks, tokens of the budget.

A joining sequence gets blocks for all its known tokens at once, so that prompts in the making never
preempt each other, and it leaves one idle block per running sequence, so that joining does not
cause preemption in the next few steps. For both, sequences of a worse lane count as room (`lanes.
py`): they are put out, but only if that is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from ridgeline.engine.scheduler.admission.limits import SchedulerLimits
from ridgeline.engine.scheduler.batching.base import BatchingPolicy, QueueView
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.block_tables import BlockTables
from ridgeline.engine.scheduler.kv.prefix_cache import BlockCache
from ridgeline.engine.scheduler.queue.lanes import Lane
from ridgeline.engine.scheduler.queue.sequence_registry import SequenceRegistry
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.engine.scheduler.step_builder import StepBuilder


class Admitted(msgspec.Struct, frozen=True):
    """A sequence that has just been seated, and how many tokens this step computes of it."""

    seq: Sequence
    num_tokens: int


class _Beginning(msgspec.Struct, frozen=True):
    """Blocks that hold a sequence's beginning already, and how many tokens of it."""

    blocks: list[int]
    computed: int


class Admitter:
    """See the head of this file. `preempt` puts a sequence out of its seat."""

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: BatchingPolicy,
        registry: SequenceRegistry,
        tables: BlockTables,
        cache: BlockCache,
        pool: BlockPool,
        preempt: Callable[[Sequence, StepBuilder], None],
    ) -> None:
        self._limits, self._policy, self._registry = limits, policy, registry
        self._tables, self._cache, self._pool = tables, cache, pool
        self._preempt = preempt

    def next(self, lane: Lane, step: StepBuilder) -> Admitted | None:
        """Seat the next in order of the lane; None if there is nobody, or it has to wait."""
        seq = self._candidate(lane, step)
        if seq is None:
            return None
        beginning = self._beginning(seq, step.now_s)
        num_tokens = step.budget.offer(seq.known - beginning.computed)
        if not num_tokens and not self._sits_idle(seq, lane, step):
            return None
        if not self._make_room(seq, beginning, lane, step):
            return None
        self._seat(seq, beginning, lane, step.now_s)
        return Admitted(seq, num_tokens)

    def wake_s(self, now_s: float) -> float | None:
        """When the policy may let somebody join although nobody comes or goes."""
        for lane in self._registry.lanes:
            if len(lane.unstarted):  # a worse lane waits for it
                return self._policy.wake_s(self._view(lane, StepBuilder(self._limits, now_s)))
        return None

    def ensure_slot(self, lane: Lane, step: StepBuilder) -> bool:
        """Is there a seat, or somebody of a worse lane in one? Then it is freed."""
        if len(self._registry.running) < self._limits.max_num_seqs:
            return True
        if self._registry.num_running_up_to(lane) >= self._limits.max_num_seqs:
            return False
        self._preempt(self._registry.running[-1], step)
        return True

    def _candidate(self, lane: Lane, step: StepBuilder) -> Sequence | None:
        """The next in order for whom there is a seat; a fresh request needs the policy's leave too."""
        if self._registry.num_running_up_to(lane) >= self._limits.max_num_seqs:
            return None
        fresh, back = lane.unstarted.peek(), lane.resuming.peek()
        if fresh is None or (back is not None and back.key < fresh.key):
            return back
        return fresh if self._policy.admits(self._view(lane, step, step.budget.left)) else back

    def _beginning(self, seq: Sequence, now_s: float) -> _Beginning:
        source = seq.group.source_for(seq)
        if source is not None:
            blocks = source.blocks[: self._pool.blocks_for(seq.num_prompt)]
            return _Beginning(blocks, seq.num_prompt - 1)
        if seq.num_prompt_logprobs is not None:  # they take the logits of every prompt position
            return _Beginning([], 0)
        blocks = self._cache.match(seq, now_s)
        return _Beginning(blocks, len(blocks) * self._pool.block_size)

    def _sits_idle(self, seq: Sequence, lane: Lane, step: StepBuilder) -> bool:
        """May it take a seat although the budget leaves it no token in this step?"""
        return not seq.group.started and self._policy.admits(self._view(lane, step))

    def _make_room(
        self, seq: Sequence, beginning: _Beginning, lane: Lane, step: StepBuilder
    ) -> bool:
        """Put sequences of worse lanes out until there are a seat and blocks; nobody if even that
        would not be enough."""
        if self._num_short(seq, beginning, lane) > self._num_to_be_had(beginning, lane):
            return False
        seated = self.ensure_slot(lane, step)
        assert seated, "there is no seat for a candidate"
        while self._num_short(seq, beginning, lane) > 0:
            self._preempt(self._registry.running[-1], step)
        return True

    def _num_short(self, seq: Sequence, beginning: _Beginning, lane: Lane) -> int:
        """Blocks that are missing; each running sequence is left one to grow into."""
        needed = self._tables.num_needed(seq.known, beginning.blocks, beginning.computed)
        return needed + self._registry.num_running_up_to(lane) - self._pool.num_idle

    def _num_to_be_had(self, beginning: _Beginning, lane: Lane) -> int:
        """Blocks that only sequences of worse lanes own, those that would be taken over apart."""
        worse = self._registry.running[self._registry.num_running_up_to(lane) :]
        if not worse:
            return 0
        owners = Counter(block for seq in worse for block in seq.blocks)
        kept = set(beginning.blocks)
        return sum(self._pool.refs(b) == n and b not in kept for b, n in owners.items())

    def _seat(self, seq: Sequence, beginning: _Beginning, lane: Lane, now_s: float) -> None:
        """Seat and blocks for all known tokens, those of the beginning shared."""
        (lane.resuming if seq.group.started else lane.unstarted).pop()
        self._tables.adopt(seq, beginning.blocks, beginning.computed, now_s)
        reserved = self._tables.reserve(seq, seq.pending)
        assert reserved, "num_needed and reserve disagree"
        self._registry.activate(seq)

    def _view(self, lane: Lane, step: StepBuilder, num_tokens: int = 0) -> QueueView:
        oldest_s = lane.unstarted.oldest_arrival_s
        return QueueView(
            step.now_s,
            sum(each.num_started for each in self._registry.up_to(lane)) - step.num_admitted,
            step.num_admitted,
            self._limits.max_num_seqs,
            len(lane.unstarted),
            step.now_s if oldest_s is None else oldest_s,
            num_tokens,
        )
