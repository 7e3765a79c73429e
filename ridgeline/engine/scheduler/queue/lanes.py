"""Two lanes: interactive requests, and background requests that yield to them.

    lane 0   interactive   everything clients send
    lane 1   background    batch requests: they use what is left over, as long as it is left over

Within a lane, order is by priority and waiting time, and a sequence keeps its slot until blocks run
out. Between lanes neither holds. A step is planned lane by lane, and the interactive lane is
planned as if the background lane were empty: it takes slots and blocks from background sequences,
last in order first, as readily as it takes free ones. While an interactive request waits, no
background request is admitted. While interactive requests run, a step computes only as many
background tokens as their SLOs leave room for, or as many as were configured. A preempted
background sequence keeps its known tokens and resumes later; with the prefix cache on, most of what
it had computed is found again.

Invariant (tests/invariants/test_lanes.py): without a prefix cache, the interactive runs of every
step are the same as if there had never been a background request.

When it loses: background requests may starve for as long as interactive traffic keeps the engine
busy. Their deadlines are the concern of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.engine.scheduler.kv.tiers import LoadWait
from ridgeline.engine.scheduler.queue.fair_queue import FairQueue
from ridgeline.engine.scheduler.queue.waiting_queue import WaitingQueue
from ridgeline.engine.scheduler.sequence import Sequence


@dataclass(slots=True, eq=False)
class Lane:
    """The waiting sequences of one lane, and counts of its sequences.

    `unstarted` holds choice 0 of requests that have not started, `resuming` the sequences of
    started requests that are without a slot. `held` are unstarted ones that wait, outside the
    queue, for blocks of their prefix to be read (by sequence id). `num_started` counts unfinished
    choices of started requests, `num_running` the sequences with a slot.
    """

    rank: int
    unstarted: FairQueue = field(default_factory=FairQueue)
    resuming: WaitingQueue = field(default_factory=WaitingQueue)
    held: dict[int, tuple[Sequence, LoadWait]] = field(default_factory=dict)
    num_started: int = 0
    num_running: int = 0

    @property
    def has_waiting(self) -> bool:
        """True if a sequence of this lane waits for a slot."""
        return len(self.unstarted) > 0 or len(self.resuming) > 0

    def hold(self, seq: Sequence, wait: LoadWait) -> None:
        """Take an unstarted sequence out of the queue until its load is over."""
        self.unstarted.discard(seq)
        self.held[seq.id] = seq, wait

    def release_held(self, now_s: float) -> None:
        """Queue the sequences that need not wait any longer."""
        for seq, wait in list(self.held.values()):
            if wait.wake_s(now_s) <= now_s:
                del self.held[seq.id]
                self.unstarted.push(seq)

    def discard_unstarted(self, seq: Sequence) -> bool:
        """Remove an unstarted sequence; False if it is none."""
        return self.unstarted.discard(seq) or self.held.pop(seq.id, None) is not None
