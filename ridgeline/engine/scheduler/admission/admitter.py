"""Admits waiting sequences: finds each one a slot, blocks, and tokens of the step's budget.

An admitted sequence gets blocks for all of its known tokens at once, so that prompts being computed
never preempt each other. It must leave one idle block per running sequence, so that admission does
not cause preemption within the next few steps. Sequences of a lower-priority lane count as free
room for both purposes: they are preempted, but only if that yields enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from ridgeline.engine.scheduler.admission.first_token_times import FirstTokenTimes
from ridgeline.engine.scheduler.admission.limits import SchedulerLimits
from ridgeline.engine.scheduler.batching.base import BatchingPolicy, QueueView
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.block_tables import BlockTables
from ridgeline.engine.scheduler.kv.prefix_cache import BlockCache, ComputedPrefix
from ridgeline.engine.scheduler.queue.lanes import Lane
from ridgeline.engine.scheduler.queue.sequence_registry import SequenceRegistry
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.engine.scheduler.step_builder import StepBuilder
from ridgeline.records import Event


class Admitted(msgspec.Struct, frozen=True):
    """A sequence that was just given a slot, and how many of its tokens this step computes."""

    seq: Sequence
    num_tokens: int


class Admitter:
    """Moves sequences from the waiting queues into slots.

    `preempt` takes a sequence's slot and blocks away.
    """

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
        self._first_tokens = FirstTokenTimes()

    @property
    def admits_immediately(self) -> bool:
        """Whether the policy admits every request for which there is room."""
        return self._policy.admits_immediately

    def observe(self, events: Iterable[Event]) -> None:
        """Take the events of a step, for policies that wait."""
        if not self._policy.admits_immediately:
            self._first_tokens.observe(events)

    def admit_next(self, lane: Lane, step: StepBuilder) -> Admitted | None:
        """Admit the next sequence of the lane; None if there is none or it has to wait."""
        seq = self._candidate(lane, step)
        if seq is None:
            return None
        prefix = self._find_prefix(seq, step.now_s)
        num_tokens = step.offer(seq, prefix.num_computed)
        if not num_tokens:
            # Some policies fill slots even if the budget has no token left for this step.
            may_idle = not seq.group.started and self._policy.admits(self._queue_view(lane, step))
            if not may_idle:
                return None
        if not self._make_room(seq, prefix, lane, step):
            return None
        (lane.resuming if seq.group.started else lane.unstarted).pop()
        prefix, held = self._cache.tiers.fill(seq, prefix, step.now_s)
        self._tables.adopt_prefix(seq, prefix, step.now_s)
        self._pool.release_all(held)
        reserved = self._tables.reserve_known(seq)
        assert reserved, "num_blocks_needed and reserve_known disagree"
        self._registry.activate(seq)
        return Admitted(seq, num_tokens)

    def wake_s(self, now_s: float) -> float | None:
        """When the policy may admit a request even if none arrives or ends; None for never."""
        for lane in self._registry.lanes:
            if len(lane.unstarted):  # lower-priority lanes wait for this one
                return self._policy.wake_s(self._queue_view(lane, StepBuilder(self._limits, now_s)))
        return None

    def ensure_slot(self, lane: Lane, step: StepBuilder) -> bool:
        """Return True if a slot is free, preempting a lower-priority sequence if necessary."""
        if len(self._registry.running) < self._limits.max_num_seqs:
            return True
        if self._registry.num_running_up_to(lane) >= self._limits.max_num_seqs:
            return False
        self._preempt(self._registry.running[-1], step)
        return True

    def _candidate(self, lane: Lane, step: StepBuilder) -> Sequence | None:
        """The next sequence, if there is a slot and, for a new request, the policy agrees."""
        if self._registry.num_running_up_to(lane) >= self._limits.max_num_seqs:
            return None
        unstarted, resuming = lane.unstarted.peek(), lane.resuming.peek()
        if unstarted is None or (resuming is not None and resuming.key < unstarted.key):
            return resuming
        view = self._queue_view(lane, step, step.budget.left)
        return unstarted if self._policy.admits(view) else resuming

    def _find_prefix(self, seq: Sequence, now_s: float) -> ComputedPrefix:
        """What need not be computed again: a sibling's prompt, or else a prefix hit."""
        if not self._limits.shares_prefixes:
            return ComputedPrefix()
        source = seq.group.find_computed_prompt(seq)
        if source is not None and seq.eviction is None:  # it holds what its own queries chose
            prefix = self._tables.shared_prefix(source, seq.num_prompt)
            if prefix is not None:
                return prefix
        if seq.num_prompt_logprobs is not None:  # these need the logits of every prompt position
            return ComputedPrefix()
        return self._cache.tiers.extend(seq, self._cache.match(seq, now_s), now_s)

    def _make_room(
        self, seq: Sequence, prefix: ComputedPrefix, lane: Lane, step: StepBuilder
    ) -> bool:
        """Preempt lower-priority lanes until a slot and blocks are free; none if not enough."""
        if self._num_missing(seq, prefix, lane) > self._num_preemptible(prefix, lane):
            return False
        has_slot = self.ensure_slot(lane, step)
        assert has_slot, "a candidate without a slot"
        while self._num_missing(seq, prefix, lane) > 0:
            self._preempt(self._registry.running[-1], step)
        return True

    def _num_missing(self, seq: Sequence, prefix: ComputedPrefix, lane: Lane) -> int:
        """Missing blocks; each running sequence keeps idle ones for a block of positions."""
        needed = self._tables.num_blocks_needed(seq, prefix)
        kept = self._registry.num_running_up_to(lane) * self._tables.num_groups
        return needed + kept - self._pool.num_idle

    def _num_preemptible(self, prefix: ComputedPrefix, lane: Lane) -> int:
        """Blocks that preempting lower-priority lanes would free, apart from those of `prefix`."""
        lower = self._registry.running[self._registry.num_running_up_to(lane) :]
        if not lower:
            return 0
        owners = Counter(block for seq in lower for block in seq.all_blocks)
        kept = set(prefix.all_blocks)
        return sum(self._pool.ref_count(b) == n and b not in kept for b, n in owners.items())

    def _queue_view(self, lane: Lane, step: StepBuilder, num_tokens: int = 0) -> QueueView:
        oldest_s, first = lane.unstarted.oldest_arrival_s, lane.unstarted.peek()
        num_started = sum(other.num_started for other in self._registry.lanes_up_to(lane))
        return QueueView(
            step.now_s,
            num_started - step.num_admitted,
            step.num_admitted,
            self._limits.max_num_seqs,
            len(lane.unstarted),
            step.now_s if oldest_s is None else oldest_s,
            num_tokens,
            None if first is None else self._first_tokens.latest_start_s(first.request),
        )
