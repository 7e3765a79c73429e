"""The memory tier against a dictionary, over random operations."""

from __future__ import annotations

import random

from ridgeline.engine.scheduler.kv.memory_tier import MemoryTier


def test_random_operations_agree_with_a_dictionary() -> None:
    for seed in range(20):
        rng, tier = random.Random(seed), MemoryTier(4)
        content: dict[int, bytes] = {}  # what was written to each slot
        pinned: list[tuple[bytes, int]] = []
        for _ in range(200):
            key, action = bytes([rng.randrange(8)]), rng.randrange(5)
            if action == 0 and (slot := tier.reserve()) is not None:
                assert slot not in [own for _, own in pinned]
                content[slot] = key
                if rng.random() < 0.2:
                    tier.give_back(slot)
                elif not tier.publish(key, slot):
                    assert key in tier
            elif action == 1 and (slot := tier.pin(key)) is not None:
                pinned.append((key, slot))
            elif action == 2 and pinned:
                tier.unpin([pinned.pop(rng.randrange(len(pinned)))[1]])
            elif action == 3:
                assert tier.touch(key) == (key in tier)
            elif key not in [own for own, _ in pinned]:
                tier.drop(key)
                assert key not in tier
            for own, slot in tier._slot_of.items():
                assert content[slot] == own
            assert all(content[slot] == own for own, slot in pinned), "a pinned slot was reused"
            slots = [*tier._free, *tier._slot_of.values()]
            assert len(slots) == len(set(slots)) == 4


def test_least_recently_used_block_is_replaced_first() -> None:
    tier = MemoryTier(2)
    for key in (b"a", b"b"):
        slot = tier.reserve()
        assert slot is not None
        tier.publish(key, slot)
    tier.touch(b"a")
    assert tier.reserve() is not None
    assert b"b" not in tier
    assert b"a" in tier
