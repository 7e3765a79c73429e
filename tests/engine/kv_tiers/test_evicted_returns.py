"""When evicted blocks are expected to return."""

from __future__ import annotations

from ridgeline.engine.scheduler.kv.evicted_returns import EvictedReturns


def doubting(trial: int = 3, max_remembered: int = 2) -> EvictedReturns:
    returns = EvictedReturns(trial, max_remembered)
    for _ in range(trial):
        assert returns.are_expected
        returns.note_saved()
    assert not returns.are_expected
    return returns


def test_load_renews_the_trial() -> None:
    returns = doubting()
    returns.note_loaded()
    returns.note_saved()
    returns.note_saved()
    assert returns.are_expected
    returns.note_saved()
    assert not returns.are_expected


def test_block_that_is_asked_for_after_its_eviction_ends_the_doubt() -> None:
    returns = doubting()
    returns.note_evicted(b"a")
    returns.note_missing(b"b")
    assert not returns.are_expected
    returns.note_missing(b"a")
    assert returns.are_expected


def test_what_was_evicted_last_is_remembered() -> None:
    returns = doubting(max_remembered=2)
    for digest in (b"a", b"b", b"a", b"c"):
        returns.note_evicted(digest)
    returns.note_missing(b"b")
    assert not returns.are_expected
    returns.note_missing(b"a")
    assert returns.are_expected
