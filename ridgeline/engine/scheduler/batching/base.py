"""When may a waiting request join the running ones? The contract of the batching policies.

A policy decides *when*; who goes first is the queue's order, and whether it fits is the block
pool's answer. Policies hold no state: everything they may look at is in the `QueueView`.

Invariants, in words:
  1. With nothing started and requests waiting, a policy lets one join now, or names the instant from
     which it will (`wake_s`), however few requests there are. Otherwise work could wait for ever.
  2. It never fills more than `max_num_seqs` seats, except that one request whose choices alone need
     more may start alone.
  3. Sequences that have started (preempted ones, choices about to fork) come back without asking
  it.

The reference of the family is `static` with one seat: one request at a time.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class QueueView(msgspec.Struct, frozen=True):
    """What a policy sees, before each request that might join.

    `num_started` sequences held a seat before this step and `num_admitted` were given one in it (an
    request takes a seat for each of its choices). `num_waiting` requests wait, those that just joined not
    counted; the oldest came at `oldest_arrival_s`. `num_tokens` is what the step's token budget
    would grant the next request: 0 means that it would get a seat now but be computed only in a later
    step.
    """

    now_s: float
    num_started: int
    num_admitted: int
    max_num_seqs: int
    num_waiting: int
    oldest_arrival_s: float
    num_tokens: int

    @property
    def num_free_slots(self) -> int:
        return self.max_num_seqs - self.num_started - self.num_admitted


class PolicyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """For policies that wait for a batch: start at `num_to_start` requests (None: as many as there are
    seats), or when the oldest has waited `wait_s` seconds."""

    wait_s: float = 0.0
    num_to_start: int | None = None


class BatchingPolicy(Protocol):
    """Built with PolicyOptions; see the head of this file."""

    def __init__(self, options: PolicyOptions) -> None: ...

    def admits(self, view: QueueView) -> bool:
        """May the next waiting request take its seats now?"""

    def wake_s(self, view: QueueView) -> float | None:
        """With requests waiting: the instant from which `admits` may turn true although no request comes or
        goes (view.now_s: now; None: never)."""
