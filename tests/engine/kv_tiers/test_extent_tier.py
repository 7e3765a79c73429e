"""Extents on disk: bounded, shared by processes, and never believed when damaged."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ridgeline.engine.kv_tiers.directory import ExtentDirectory
from ridgeline.engine.kv_tiers.extent_tier import ExtentTier
from ridgeline.engine.kv_tiers.remote import RemoteExtents
from ridgeline.engine.scheduler.kv.cache_tiers import Rate
from ridgeline.errors import CannotRun

SIZE = 64
KEYS = [bytes([i]) * 33 for i in range(8)]
BLOCKS = [bytes(range(i, i + SIZE)) for i in range(8)]


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make_tier(root: Path, *, max_bytes: int | None = 1 << 20, signature: str = "s") -> ExtentTier:
    tier = ExtentTier(
        "disk",
        ExtentDirectory(root),
        signature,
        SIZE,
        max_bytes=max_bytes,
        rate=Rate(1e9),
        clock=Clock(),
    )
    tier.refresh()
    return tier


def write(tier: ExtentTier, first: int, end: int) -> None:
    tier.write(KEYS[first:end], [memoryview(block) for block in BLOCKS[first:end]])


def read(tier: ExtentTier, keys: Sequence[bytes]) -> dict[bytes, bytes]:
    """The blocks that arrived intact."""
    buffers = {key: bytearray(SIZE) for key in keys}
    intact = tier.read(keys, lambda key: memoryview(buffers[key]))
    return {key: bytes(buffers[key]) for key in intact}


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))


def test_blocks_come_back_in_any_order_and_after_a_restart(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    write(tier, 0, 5)
    write(tier, 5, 8)
    for reader in (tier, make_tier(tmp_path)):
        assert len(reader) == 8
        found = read(reader, [KEYS[7], KEYS[1], KEYS[2], KEYS[4]])
        assert found == {KEYS[i]: BLOCKS[i] for i in (7, 1, 2, 4)}
    assert all(path.stat().st_mode & 0o077 == 0 for path in files(tmp_path))


def test_two_processes_share_a_directory(tmp_path: Path) -> None:
    one, other = make_tier(tmp_path), make_tier(tmp_path)
    write(one, 0, 3)
    assert KEYS[0] not in other
    other.refresh()
    assert read(other, KEYS[:3]) == {KEYS[i]: BLOCKS[i] for i in range(3)}
    files(tmp_path)[0].unlink()
    assert read(one, KEYS[:3]) == {}, "removed by another process"
    assert KEYS[0] not in one
    assert one.counts.errors == 0


def test_a_file_cut_anywhere_is_never_believed(tmp_path: Path) -> None:
    write(make_tier(tmp_path), 0, 3)
    [path] = files(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        tier = make_tier(tmp_path)
        assert read(tier, KEYS[:3]) == {}
        assert not path.exists(), "a damaged file is removed"


def test_a_flipped_bit_anywhere_costs_at_most_the_file(tmp_path: Path) -> None:
    write(make_tier(tmp_path), 0, 3)
    [path] = files(tmp_path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 2):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(damaged)
        for key, block in read(make_tier(tmp_path), KEYS[:3]).items():
            assert block == BLOCKS[KEYS.index(key)]


def test_a_file_that_shrinks_while_it_is_known_is_read_as_missing(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    write(tier, 0, 4)
    [path] = files(tmp_path)
    os.truncate(path, path.stat().st_size - SIZE // 2)
    assert KEYS[3] not in read(tier, KEYS[:4])
    assert tier.counts.errors == 1


def test_blocks_of_another_model_are_not_found(tmp_path: Path) -> None:
    write(make_tier(tmp_path, signature="one"), 0, 3)
    other = make_tier(tmp_path, signature="other")
    assert len(other) == 0
    [path] = files(tmp_path)
    target = tmp_path / "other" / path.parent.name / path.name
    target.parent.mkdir(parents=True)
    path.rename(target)  # not even if a file is put where it does not belong
    other.refresh()
    assert len(other) == 0


def test_least_recently_used_extents_make_room(tmp_path: Path) -> None:
    one = make_tier(tmp_path)
    write(one, 0, 2)
    size = files(tmp_path)[0].stat().st_size
    for path in files(tmp_path):
        os.utime(path, (1, 1))
    tier = make_tier(tmp_path, max_bytes=3 * size)
    write(tier, 2, 4)
    for path in files(tmp_path):
        os.utime(path, (2, 2)) if path.stat().st_mtime > 1 else None
    read(tier, KEYS[:1])  # the oldest extent is used again
    write(tier, 4, 6)
    write(tier, 6, 8)
    assert [KEYS[i] in tier for i in (0, 2, 4, 6)] == [True, False, True, True]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 3 * size
    assert tier.num_bytes == 3 * size


def test_a_limit_below_one_extent_stores_nothing(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, max_bytes=SIZE)
    write(tier, 0, 4)
    assert files(tmp_path) == []
    assert tier.counts.errors == 1


def test_a_full_disk_pauses_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make_tier(tmp_path)

    def fail(self: object, name: str, parts: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ExtentDirectory, "write", fail)
        write(tier, 0, 2)
        write(tier, 2, 4)
    assert tier.counts.errors == 1, "the second write was not even tried"
    write(tier, 4, 6)
    assert len(tier) == 0
    tier._clock.now_s += 61.0
    write(tier, 4, 6)
    assert read(tier, [KEYS[4]]) == {KEYS[4]: BLOCKS[4]}


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    class Unreadable(bytes):
        def __len__(self) -> int:
            raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        ExtentDirectory(tmp_path).write("s/aa/x.kv", [b"head", Unreadable(b"x")])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_temporary_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "x.kv.1-1-1.tmp", tmp_path / "y.kv.1-1-1.tmp"
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (1, 1))
    ExtentDirectory(tmp_path)
    assert not old.exists()
    assert new.exists()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CannotRun, match="kv-tier-dir"):
        ExtentDirectory(tmp_path / "file" / "below")


def test_an_object_store_works_like_a_directory() -> None:
    url = "memory://tier-test"
    tiers = [
        ExtentTier("remote", RemoteExtents(url), "s", SIZE, max_bytes=None, rate=Rate(1e9))
        for _ in range(2)
    ]
    write(tiers[0], 0, 4)
    tiers[1].refresh()
    assert read(tiers[1], KEYS[:4]) == {KEYS[i]: BLOCKS[i] for i in range(4)}
    files = RemoteExtents(url)
    [stored] = files.list()
    files.write(stored.name, [files.head(stored.name, stored.size - 1)])
    assert read(tiers[0], [KEYS[3]]) == {}, "truncated"
    assert files.list() == []


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(CannotRun, match="kv-tier-url"):
        RemoteExtents("nosuchprotocol://bucket")
