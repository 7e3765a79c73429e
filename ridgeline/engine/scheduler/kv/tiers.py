"""What the scheduler needs from the tiers below its prefix cache, and a cache without any.

A block that the pool is about to reuse is saved to a lower tier, and a sequence whose beginning is
there gets it back in place of computing it. The scheduler only decides: a plan names the blocks to
store and to load (`StepPlan.stores`, `StepPlan.loads`), and their bytes move before its runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from ridgeline.engine.scheduler.kv.prefix_cache import ComputedPrefix
    from ridgeline.engine.scheduler.plan import StepPlan
    from ridgeline.engine.scheduler.sequence import Sequence

STAGING_BYTES = 256 << 20
"""Memory through which blocks pass to and from storage where no memory tier was configured."""

DIRECTORY_BYTES = 16 << 30
"""Size of the directory where none was configured."""

MIN_SLOTS = 16
"""The fewest slots of a memory tier."""

GUESSED_MEMORY_BYTES_S = 4e9
GUESSED_DISK = (0.5e9, 0.001)
GUESSED_REMOTE = (0.1e9, 0.05)
"""Bytes per second, and seconds per access, until they have been measured."""

MISSING = -1
"""Stands in a `ComputedPrefix` for a block that a lower tier has and the pool does not."""

Transfers = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
"""Stores as (block, slot), and loads as (slot, block)."""


class LoadWait(msgspec.Struct, frozen=True):
    """A sequence waits until its load is over, or until `until_s` at most."""

    is_over: Callable[[], bool]
    until_s: float

    def wake_s(self, now_s: float) -> float:
        """When to look again."""
        return now_s if self.is_over() else max(now_s, self.until_s)


class Tiers(Protocol):
    """Copies of blocks outside the pool. Instants are seconds on the scheduler's clock."""

    @property
    def active(self) -> bool:
        """Whether there are any."""
        ...

    def save(self, block: int, group: int, digest: bytes) -> None:
        """A published block is about to be overwritten: store a copy if it is worth one."""
        ...

    def note_release(self, seq: Sequence, *, resumes: bool = False) -> None:
        """The sequence is about to return its blocks; `resumes`: it will want them again."""
        ...

    def note_published(self, seq: Sequence) -> None:
        """More full blocks of the sequence are computed and can be found."""
        ...

    def extend(self, seq: Sequence, prefix: ComputedPrefix, now_s: float) -> ComputedPrefix:
        """The prefix with what can be loaded at once, if that takes less time than computing it."""
        ...

    def fill(
        self, seq: Sequence, prefix: ComputedPrefix, now_s: float
    ) -> tuple[ComputedPrefix, list[int]]:
        """Allocate the blocks that are missing, to be loaded before the step's runs.

        Call it directly after `extend`, once there is room. Returns the prefix, and blocks of which
        the caller releases one reference each once it has adopted the prefix.
        """
        ...

    def start_loading(self, seq: Sequence, now_s: float) -> LoadWait | None:
        """Begin to read what slower tiers have of a new sequence; None if there is no need."""
        ...

    def forget(self, digests: tuple[bytes, ...]) -> None:
        """Drop the copies of blocks."""
        ...

    def take_transfers(self) -> Transfers:
        """What the plan, which is now complete, has to store and to load."""
        ...

    def end_step(self, plan: StepPlan, seconds: float) -> None:
        """The plan's transfers are done, and its runs took `seconds`."""
        ...

    def cancel_transfers(self, plan: StepPlan) -> None:
        """The plan's transfers failed: forget what they should have stored."""
        ...


class NoTiers:
    """What is evicted is lost."""

    active = False

    def save(self, block: int, group: int, digest: bytes) -> None:
        pass

    def note_release(self, seq: Sequence, *, resumes: bool = False) -> None:
        pass

    def note_published(self, seq: Sequence) -> None:
        pass

    def extend(self, seq: Sequence, prefix: ComputedPrefix, now_s: float) -> ComputedPrefix:
        return prefix

    def fill(
        self, seq: Sequence, prefix: ComputedPrefix, now_s: float
    ) -> tuple[ComputedPrefix, list[int]]:
        return prefix, []

    def start_loading(self, seq: Sequence, now_s: float) -> LoadWait | None:
        return None

    def forget(self, digests: tuple[bytes, ...]) -> None:
        pass

    def take_transfers(self) -> Transfers:
        return (), ()

    def end_step(self, plan: StepPlan, seconds: float) -> None:
        pass

    def cancel_transfers(self, plan: StepPlan) -> None:
        pass
