"""When may a waiting request be admitted? The contract of the batching policies.

A policy decides *when*. Which request goes first is decided by the queue, and whether it fits by
the block pool. Policies hold no state: all they may look at is in the `QueueView`.

Invariants:
  1. With nothing started and requests waiting, a policy admits one now or names the time from which
     it will (`wake_s`), however few requests there are. Otherwise work could wait for ever.
  2. It never fills more than `max_num_seqs` slots, except that a single request whose choices alone
     need more may start on its own.
  3. Sequences that have started (preempted ones, choices about to fork) resume without asking it.

The reference of the family is `static` with one slot: one request at a time.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

DEFAULT_WAIT_S = 0.010


class QueueView(msgspec.Struct, frozen=True):
    """What a policy sees before each request that might be admitted.

    `num_started` sequences had a slot before this step and `num_admitted` were given one in it (a
    request takes a slot for each of its choices). `num_waiting` requests wait, not counting those
    just admitted; the oldest arrived at `oldest_arrival_s`. `num_tokens` is what the step's token
    budget would grant the next request; 0 means it would get a slot now but be computed in a later
    step. `latest_start_s`: when the first request in order has to start to meet its TTFT, if that
    is known.
    """

    now_s: float
    num_started: int
    num_admitted: int
    max_num_seqs: int
    num_waiting: int
    oldest_arrival_s: float
    num_tokens: int
    latest_start_s: float | None = None

    @property
    def num_free_slots(self) -> int:
        return self.max_num_seqs - self.num_started - self.num_admitted


class PolicyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """For policies that wait for a batch.

    A batch starts with `num_to_start` requests (None: as many as there are slots), or once the
    oldest has waited `wait_s` seconds; None: by the `latest_start_s` of the first request, or after
    DEFAULT_WAIT_S where that is not known.
    """

    wait_s: float | None = 0.0
    num_to_start: int | None = None


class BatchingPolicy(Protocol):
    """Built with PolicyOptions."""

    def __init__(self, options: PolicyOptions) -> None: ...

    @property
    def admits_immediately(self) -> bool:
        """Whether a request joins as soon as there is room for it, whatever else the view says."""

    def admits(self, view: QueueView) -> bool:
        """Whether the next waiting request may take its slots now."""

    def wake_s(self, view: QueueView) -> float | None:
        """With requests waiting, the time from which `admits` may become true by itself.

        view.now_s means now, None never: only an arrival or a finished request can change it.
        """
