"""Fair shares between accounts (API keys) that wait for the same engine.

A virtual token counter per account: prompt tokens count when a request leaves the queue, output
tokens as they are sampled, both divided by the account's share. Of the accounts that wait, the one
with the lowest counter goes next. An account that was idle starts at the lowest counter of those
that wait, so that none saves up (Sheng et al., Fairness in Serving Large Language Models, OSDI
2024). Two accounts that always wait are served tokens in proportion to their shares, within the
size of one request of each, whatever the number of their requests.

Within an account, and with a single one, the order is that of `WaitingQueue`. Among accounts a more
urgent priority still goes first: only heads that are at least as urgent as the one with the
smallest key are compared by counter. What overtakes takes a key just below the smallest of the
queue, so that the order stays static once a request runs: it is not preempted by, nor resumed
behind, the requests it has overtaken.

When it loses: slots are not taken back, so an account with few, short requests still waits until
one of the running requests ends.
"""

from __future__ import annotations

import math
from operator import attrgetter

from ridgeline.engine.scheduler.queue.waiting_queue import WaitingQueue
from ridgeline.engine.scheduler.sequence import Sequence

_KEY = attrgetter("key")


class FairQueue:
    """A `WaitingQueue` for each account that waits."""

    def __init__(self) -> None:
        self._queues: dict[str, WaitingQueue] = {}  # none of them is empty
        self._served: dict[str, float] = {}  # tokens / share
        self._last_served = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def num_accounts(self) -> int:
        """Accounts that wait."""
        return len(self._queues)

    @property
    def oldest_arrival_s(self) -> float | None:
        """Arrival time of the sequence that was pushed first; None if the queue is empty."""
        oldest = [queue.oldest_arrival_s for queue in self._queues.values()]
        return min((at_s for at_s in oldest if at_s is not None), default=None)

    def push(self, seq: Sequence) -> None:
        """Add a sequence."""
        account = seq.request.account
        if account not in self._queues:
            floor = min((self._served[name] for name in self._queues), default=self._last_served)
            self._served[account] = max(self._served.get(account, 0.0), floor)
            self._queues[account] = WaitingQueue()
        self._queues[account].push(seq)

    def peek(self) -> Sequence | None:
        """The sequence that goes next; None if the queue is empty."""
        heads = [head for queue in self._queues.values() if (head := queue.peek()) is not None]
        if len(heads) < 2:
            return heads[0] if heads else None
        first = min(heads, key=_KEY)
        candidates = [head for head in heads if head.request.priority <= first.request.priority]
        chosen = min(candidates, key=lambda head: (self._served[head.request.account], head.key))
        if chosen is not first:
            rank, (order_s, _, _) = first.key
            chosen.group.order_s = math.nextafter(order_s, -math.inf)
            chosen.key = (rank, (chosen.group.order_s, chosen.group.serial, chosen.index))
        return chosen

    def in_order(self) -> list[Sequence]:
        """All sequences, in the order in which `pop` would return them, for a single account."""
        assert len(self._queues) <= 1
        return [seq for queue in self._queues.values() for seq in queue.in_order()]

    def pop(self) -> Sequence:
        """Remove and return the sequence that goes next, and count its prompt as served."""
        seq = self.peek()
        assert seq is not None, "pop from an empty queue"
        self.discard(seq)
        self.count_served(seq, seq.num_prompt)
        self._last_served = self._served[seq.request.account]
        return seq

    def discard(self, seq: Sequence) -> bool:
        """Remove a sequence, wherever it is in the queue; False if it is not in it."""
        account = seq.request.account
        queue = self._queues.get(account)
        if queue is None or not queue.discard(seq):
            return False
        if not len(queue):
            del self._queues[account]
        return True

    def count_served(self, seq: Sequence, num_tokens: int) -> None:
        """Count tokens that were computed for the account of a sequence."""
        if (account := seq.request.account) in self._served:
            self._served[account] += num_tokens / seq.request.share
