"""Who exists and who sits where: requests, their sequences, the running list and the two queues.

                 add            sit                    leave
    request ──▶ fresh queue ──▶ running (sorted) ──▶ finished
                              │      ▲ sit
                        stand ▼      │
                            returning queue  ◀── choices forked without a free seat

Every lane (`lanes.py`) has queues of its own; those who run are one list, lane by lane. The roster
keeps places and counts; blocks are the tables' business, and when anyone moves is the
scheduler's. A seat is one of `max_num_seqs`; only seated sequences own blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from ridgeline.engine.scheduler.queue.lanes import Lane
from ridgeline.engine.scheduler.queue.waiting_queue import order_key
from ridgeline.engine.scheduler.sequence import Sequence, SequenceGroup, State
from ridgeline.engine.scheduler.stopping import derive_seed
from ridgeline.errors import BadInput
from ridgeline.records import Request

_KEY = attrgetter("key")


class SequenceRegistry:
    """See the head of this file. `seed` is what requests without a seed derive theirs from."""

    def __init__(self, aging_s: float, seed: int) -> None:
        self._aging_s, self._seed = aging_s, seed
        self.requests: dict[str, SequenceGroup] = {}
        self.running: list[Sequence] = []  # in order: lowest key first, lane by lane
        self.lanes = (Lane(0), Lane(1))  # online, background
        self.num_unfinished = 0  # unfinished choices of all requests
        self._by_id: dict[int, Sequence] = {}
        self._num_added = self._num_sequences = 0

    @property
    def num_waiting(self) -> int:
        """Unfinished choices without a seat."""
        return self.num_unfinished - len(self.running)

    def lane(self, request: Request) -> Lane:
        return self.lanes[request.background]

    def up_to(self, lane: Lane) -> tuple[Lane, ...]:
        """The lane and the better ones."""
        return self.lanes[: lane.rank + 1]

    def num_running_up_to(self, lane: Lane) -> int:
        if not lane.rank:
            return lane.num_running
        return sum([each.num_running for each in self.up_to(lane)])

    def running_by_id(self, seq_id: int) -> Sequence | None:
        return self._by_id.get(seq_id)

    def request_id(self, seq_id: int) -> str | None:
        """Whose running sequence it is."""
        seq = self._by_id.get(seq_id)
        return None if seq is None else seq.request.id

    def live(self, request_id: str, index: int) -> Sequence | None:
        """An unfinished choice that has a sequence."""
        group = self.requests.get(request_id)
        return None if group is None else group.live.get(index)

    def add(self, request: Request) -> SequenceGroup:
        if request.id in self.requests:
            raise BadInput(
                "a request with this id is being served", value=request.id, fix="use a new id"
            )
        serial, own = self._num_added, request.sampling.seed
        self._num_added += 1
        seed = derive_seed(self._seed, serial) if own is None else own
        group = SequenceGroup(request, serial, seed, unforked=list(range(1, request.sampling.n)))
        group.next_index = request.sampling.n
        self.requests[request.id] = group
        self.num_unfinished += request.sampling.n
        self.lane(request).unstarted.push(self._new(group, 0, list(request.prompt)))
        return group

    def start(self, group: SequenceGroup) -> int:
        """The request leaves the fresh queue for good; the number of seats that it will want."""
        group.started = True
        self.lane(group.request).num_started += group.num_unfinished
        return group.num_unfinished

    def branch(self, source: Sequence, index: int, num_known: int) -> Sequence:
        """Choice `index`, not seated yet, knowing the first `num_known` tokens of `source`."""
        seq = self._new(source.group, index, source.tokens[:num_known])
        seq.digests = list(source.digests)
        return seq

    def add_choice(self, group: SequenceGroup) -> int:
        """Make place for one choice more than was asked for; its index."""
        group.next_index += 1
        self.num_unfinished += 1
        self.lane(group.request).num_started += 1
        return group.next_index - 1

    def activate(self, seq: Sequence) -> None:
        seq.state = State.RUNNING
        self._by_id[seq.id] = seq
        self.lane(seq.request).num_running += 1
        insort(self.running, seq, key=_KEY)

    def deactivate(self, seq: Sequence) -> None:
        """Give the seat back and wait to return."""
        self._release_slot(seq)
        self.wait(seq)

    def wait(self, seq: Sequence) -> None:
        """Wait for a seat as a sequence of a request that has started."""
        seq.state = State.WAITING
        self.lane(seq.request).resuming.push(seq)

    def remove(self, seq: Sequence) -> None:
        """The sequence is finished; with its last choice, the request is gone."""
        if seq.state is State.RUNNING:
            self._release_slot(seq)
        lane = self.lane(seq.request)
        lane.unstarted.discard(seq)
        lane.resuming.discard(seq)
        seq.state = State.FINISHED
        group = seq.group
        del group.live[seq.index]
        self._forget(group, 1)
        if group.unforked and not group.live:
            self._succeed(group)

    def remove_group(self, group: SequenceGroup) -> None:
        """The request is gone, with choices that never became sequences too."""
        num, group.unforked = len(group.unforked), []
        self._forget(group, num)
        for seq in list(group.live.values()):
            self.remove(seq)

    def _succeed(self, group: SequenceGroup) -> None:
        """The choice that was to compute the prompt is gone: the next one does."""
        seq = self._new(group, group.unforked.pop(0), list(group.request.prompt))
        lane = self.lane(group.request)
        (lane.resuming if group.started else lane.unstarted).push(seq)

    def _forget(self, group: SequenceGroup, num: int) -> None:
        self.num_unfinished -= num
        self.lane(group.request).num_started -= num if group.started else 0
        if not group.num_unfinished:
            self.requests.pop(group.request.id, None)

    def _release_slot(self, seq: Sequence) -> None:
        place = bisect_left(self.running, seq.key, key=_KEY)
        assert self.running[place] is seq
        del self.running[place]
        self.lane(seq.request).num_running -= 1
        del self._by_id[seq.id]

    def _new(self, group: SequenceGroup, index: int, tokens: list[int]) -> Sequence:
        seq = Sequence(
            id=self._num_sequences,
            group=group,
            index=index,
            seed=derive_seed(group.seed, index),
            key=(
                self.lane(group.request).rank,
                order_key(group.request, self._aging_s, group.serial, index),
            ),
            tokens=tokens,
            num_prompt=len(group.request.prompt),
            num_prompt_logprobs=None if index else group.request.sampling.prompt_logprobs,
        )
        self._num_sequences += 1
        group.live[index] = seq
        return seq
