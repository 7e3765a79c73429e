"""All requests and their sequences, the list of running sequences and the waiting queues.

               add                   activate                remove
    request ──▶ lane.unstarted ──▶ running (sorted) ──▶ finished
                                      │       ▲ activate
                           deactivate ▼       │
                                  lane.resuming  ◀── choices forked while no slot was free

Each lane has its own queues; the running sequences are one list, ordered lane by lane. The registry
keeps positions and counts. Blocks are handled by the block tables, and the scheduler decides when a
sequence moves. There are `max_num_seqs` slots, and only sequences with a slot own blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from ridgeline.engine.scheduler.kv.eviction import SequenceEviction
from ridgeline.engine.scheduler.queue.lanes import Lane
from ridgeline.engine.scheduler.queue.waiting_queue import order_key
from ridgeline.engine.scheduler.sequence import Sequence, SequenceGroup, State
from ridgeline.engine.scheduler.stopping import derive_seed
from ridgeline.errors import BadInput
from ridgeline.records import Request

_KEY = attrgetter("key")


class SequenceRegistry:
    """Finds sequences and moves them between queues and slots.

    `aging_s` is the waiting time worth one priority level. Requests without a seed derive theirs
    from `seed`. KV eviction drops tokens in blocks of `block_size`.
    """

    def __init__(self, aging_s: float, seed: int, block_size: int) -> None:
        self._aging_s, self._seed, self._block_size = aging_s, seed, block_size
        self.groups: dict[str, SequenceGroup] = {}  # by request id
        self.running: list[Sequence] = []  # lowest key first, lane by lane
        self.lanes = (Lane(0), Lane(1))  # interactive, background
        self.num_unfinished = 0  # choices of all requests
        self._by_id: dict[int, Sequence] = {}
        self._num_added = self._num_sequences = 0
        self._free_slots: list[int] = []  # of those handed out so far
        self._num_slots = 0

    @property
    def num_waiting(self) -> int:
        """Unfinished choices without a slot."""
        return self.num_unfinished - len(self.running)

    def lane_of(self, request: Request) -> Lane:
        return self.lanes[request.background]

    def lanes_up_to(self, lane: Lane) -> tuple[Lane, ...]:
        """The lane and those of higher priority."""
        return self.lanes[: lane.rank + 1]

    def num_running_up_to(self, lane: Lane) -> int:
        """Running sequences of the lane and of those of higher priority."""
        if not lane.rank:
            return lane.num_running
        return sum([other.num_running for other in self.lanes_up_to(lane)])

    def find_running(self, seq_id: int) -> Sequence | None:
        """The running sequence with this id; None if it has ended or waits."""
        return self._by_id.get(seq_id)

    def find_choice(self, request_id: str, index: int) -> Sequence | None:
        """The unfinished sequence of a choice; None if there is none (yet)."""
        group = self.groups.get(request_id)
        return None if group is None else group.live.get(index)

    def add(self, request: Request) -> SequenceGroup:
        """Queue a request. Raises BadInput if its id is in use."""
        if request.id in self.groups:
            raise BadInput(
                "a request with this id is being served", value=request.id, fix="use a new id"
            )
        serial, own = self._num_added, request.sampling.seed
        self._num_added += 1
        seed = derive_seed(self._seed, serial) if own is None else own
        group = SequenceGroup(request, serial, seed)
        num_choices = 1 if request.sampling.beam is not None else request.sampling.n
        group.next_index = num_choices
        self.groups[request.id] = group
        self.num_unfinished += num_choices
        for index in range(num_choices):
            tokens = request.resumed_tokens(index)
            if index and not tokens:
                group.unforked.append(index)
                continue
            seq = self._new_sequence(group, index, [*request.prompt, *tokens])
            if not index:  # the others are queued once the request has started
                self.lane_of(request).unstarted.push(seq)
        return group

    def mark_started(self, group: SequenceGroup) -> int:
        """Count the request as started; returns the number of slots its choices will take.

        Choices that were added with different tokens are queued to resume.
        """
        group.started = True
        for seq in group.live.values():
            if seq.state is State.WAITING:
                self.enqueue_resuming(seq)
        self.lane_of(group.request).num_started += group.num_unfinished
        return group.num_unfinished

    def fork(self, source: Sequence, index: int, num_known: int) -> Sequence:
        """A new sequence for choice `index`, without a slot.

        It knows the first `num_known` tokens of `source`.
        """
        seq = self._new_sequence(source.group, index, source.tokens[:num_known])
        # A source that was resumed or preempted may know more than is shared.
        seq.digests = source.digests[: num_known // self._block_size]
        return seq

    def add_choice(self, group: SequenceGroup) -> int:
        """Make room for one choice more than the request named; returns its index."""
        group.next_index += 1
        self.num_unfinished += 1
        self.lane_of(group.request).num_started += 1
        return group.next_index - 1

    def activate(self, seq: Sequence) -> None:
        """Give the sequence a slot."""
        seq.state = State.RUNNING
        if self._free_slots:
            seq.state_slot = self._free_slots.pop()
        else:
            seq.state_slot, self._num_slots = self._num_slots, self._num_slots + 1
        self._by_id[seq.id] = seq
        self.lane_of(seq.request).num_running += 1
        insort(self.running, seq, key=_KEY)

    def deactivate(self, seq: Sequence) -> None:
        """Take the sequence's slot and queue it to resume; a held beam has nothing to compute."""
        self._release_slot(seq)
        if seq.held:
            seq.state = State.WAITING
        else:
            self.enqueue_resuming(seq)

    def enqueue_resuming(self, seq: Sequence) -> None:
        """Queue a sequence of a started request until a slot is free."""
        seq.state = State.WAITING
        self.lane_of(seq.request).resuming.push(seq)

    def remove(self, seq: Sequence) -> None:
        """Finish the sequence; its request is removed along with the last choice."""
        if seq.state is State.RUNNING:
            self._release_slot(seq)
        lane = self.lane_of(seq.request)
        was_first = lane.discard_unstarted(seq)
        lane.resuming.discard(seq)
        seq.state = State.FINISHED
        group = seq.group
        del group.live[seq.index]
        self._uncount_choices(group, 1)
        if was_first and group.live:  # the next choice stands for the request in the queue
            lane.unstarted.push(next(iter(group.live.values())))
        elif group.unforked and not group.live:
            self._promote_choice(group)

    def remove_group(self, group: SequenceGroup) -> None:
        """Remove the request with all of its choices, including those not forked yet."""
        num, group.unforked = len(group.unforked), []
        self._uncount_choices(group, num)
        for seq in list(group.live.values()):
            self.remove(seq)

    def _promote_choice(self, group: SequenceGroup) -> None:
        """The choice that was computing the prompt is gone: the next one takes over."""
        seq = self._new_sequence(group, group.unforked.pop(0), list(group.request.prompt))
        lane = self.lane_of(group.request)
        (lane.resuming if group.started else lane.unstarted).push(seq)

    def _uncount_choices(self, group: SequenceGroup, num: int) -> None:
        self.num_unfinished -= num
        self.lane_of(group.request).num_started -= num if group.started else 0
        if not group.num_unfinished:
            self.groups.pop(group.request.id, None)

    def _release_slot(self, seq: Sequence) -> None:
        place = bisect_left(self.running, seq.key, key=_KEY)
        assert self.running[place] is seq
        del self.running[place]
        self._free_slots.append(seq.state_slot)
        self.lane_of(seq.request).num_running -= 1
        del self._by_id[seq.id]

    def _new_sequence(self, group: SequenceGroup, index: int, tokens: list[int]) -> Sequence:
        seq = Sequence(
            id=self._num_sequences,
            group=group,
            index=index,
            seed=derive_seed(group.seed, index),
            key=(
                self.lane_of(group.request).rank,
                order_key(group.request, self._aging_s, group.serial, index)
                if group.order_s is None
                else (group.order_s, group.serial, index),
            ),
            tokens=tokens,
            num_prompt=len(group.request.prompt),
            eviction=SequenceEviction.of(
                group.request.sampling.kv_eviction, len(group.request.prompt), self._block_size
            ),
            # Those of a resumed choice have been delivered with its first token.
            num_prompt_logprobs=(
                None
                if index or group.request.resumed_tokens(0)
                else group.request.sampling.prompt_logprobs
            ),
        )
        self._num_sequences += 1
        group.live[index] = seq
        return seq
