"""Random operations on a `World`, for hypothesis and for plain random generators."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.records import Sampling
from tests.invariants.world import World


def add_random(world: World, pick: Callable[[int, int], int]) -> None:
    """Add a request that fits; `pick(low, high)` returns an integer, both ends included.

    There are few distinct prompts, so that prefixes are often shared: each extends one of two.
    """
    capacity = world.setup.capacity
    num_prompt = pick(1, min(capacity - 1, 16))
    stem = pick(0, 1)
    max_tokens = pick(1, min(capacity - num_prompt, 14))
    sampling = Sampling(
        n=max(1, pick(-2, 4)),
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, max(0, pick(-6, 6))),
        seed=pick(0, 2),
        ignore_eos=pick(0, 1) == 1,
        prompt_logprobs=None if pick(0, 4) else 1,
    )
    world.add(
        tuple(1 + (stem + i) % 3 for i in range(num_prompt)),
        sampling,
        priority=pick(-1, 1),
        tenant="ab"[pick(0, 1)],
        deadline_s=None if pick(0, 7) else world.now_s + pick(1, 8),
        background=not pick(0, 2),
    )


def forkable(world: World) -> list[Sequence]:
    """Running choices that can be forked now."""
    return [seq for seq in world.running if seq.num_pending == 1 and seq.num_output]


def end_random(world: World, pick: Callable[[int, int], int]) -> None:
    """Cancel, fail or finish a random choice."""
    unfinished = world.unfinished()
    if not unfinished:
        return
    request_id, index = unfinished[pick(0, len(unfinished) - 1)]
    how = pick(0, 2)
    if how == 0:
        world.cancel(request_id)
    elif how == 1:
        world.fail(request_id)
    else:
        world.finish(request_id, index)


def fork_random(world: World, pick: Callable[[int, int], int]) -> None:
    sequences = forkable(world)
    if sequences:
        world.fork(sequences[pick(0, len(sequences) - 1)])
