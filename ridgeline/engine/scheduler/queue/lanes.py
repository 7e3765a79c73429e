"""Lanes: requests that people wait for, and requests that may wait for people.

    lane 0   online        everything a client asks for
    lane 1   background    batch lines: what is left over, and only as long as it is left over

Priorities order a lane from within, and waiting counts (`queue.py`): whoever holds a seat keeps it
until blocks run out. Between lanes neither holds. A step is planned lane by lane, and a better lane
is planned as if the worse one were not there: it takes seats and blocks from whoever sits in the
worse lane, last in order first, as it takes idle ones. While it waits for anything, nobody of the
worse lane joins; while it runs, a step computes no more of the worse lane than people's promises
leave room for (`filling.py`), or than was asked for. Who was put out keeps the tokens it knows and
comes back; with the prefix cache on, most of what it had computed is found again.

Invariant (tests/invariants/test_lanes.py): without a prefix cache, the online runs of every step
are those of an engine that was never asked anything in the background.

When it loses: background requests may starve for as long as people keep the engine busy. Their deadline
is the batch's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.engine.scheduler.queue.waiting_queue import WaitingQueue


@dataclass(slots=True, eq=False)
class Lane:
    """What waits in one lane, and counts of its sequences.

    `unstarted`: choice 0 of requests that have not started. `resuming`: started, but without a seat.
    `num_started`: unfinished choices of requests that have started. `num_running`: with a seat.
    """

    rank: int
    unstarted: WaitingQueue = field(default_factory=WaitingQueue)
    resuming: WaitingQueue = field(default_factory=WaitingQueue)
    num_started: int = 0
    num_running: int = 0

    @property
    def has_waiting(self) -> bool:
        """Does anybody want a seat?"""
        return len(self.unstarted) > 0 or len(self.resuming) > 0
