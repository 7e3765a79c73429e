"""The store: transitions, leases, exactly-once results, files."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.errors import BadInput
from ridgeline.serve.batch import files
from ridgeline.serve.batch.lease_owner import is_gone, this_process
from ridgeline.serve.batch.records import STATUSES, TRANSITIONS
from ridgeline.serve.batch.store import CANCEL_GRACE_S, MAX_LEASES, BatchStore
from tests.serve.batch.helpers import (
    Clock,
    accepted,
    created,
    jsonl,
    now,
    outcome,
    request,
    results,
    upload,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[BatchStore]:
    opened = BatchStore(tmp_path / "batches.sqlite", clock=clock)
    yield opened
    opened.close()


def test_every_status_but_the_first_is_reachable() -> None:
    assert len(STATUSES) == 8 and {
        e for transition in TRANSITIONS.values() for e in transition
    } <= set(STATUSES)
    assert set(TRANSITIONS) == set(STATUSES) - {"validating"}


def test_batch_from_upload_to_output(store: BatchStore, clock: Clock) -> None:
    batch = accepted(store, "a", "b", "c")
    assert (batch.status, batch.total, batch.price_factor) == ("in_progress", 3, 0.5)
    clock.now_s += 5
    first, second, third = store.lease(10)
    assert store.settle([outcome(first), outcome(second, succeeded=False)]) == 2
    assert now(store, batch).status == "in_progress"
    assert store.settle([outcome(third)]) == 1
    assert now(store, batch).status == "finalizing"
    store.sweep()
    batch = now(store, batch)
    assert (batch.status, batch.completed, batch.failed) == ("completed", 2, 1)
    assert batch.completed_at == int(clock.now_s) and batch.prompt_tokens == 9
    found = [(kind, line["custom_id"]) for kind, line in results(store, batch)]
    assert found == [("output", "a"), ("output", "c"), ("error", "b")]


def test_result_is_settled_once(store: BatchStore) -> None:
    batch = accepted(store, "a", "b")
    lease, _ = store.lease(2)
    assert store.settle([outcome(lease), outcome(lease)]) == 1
    assert store.settle([outcome(lease, succeeded=False)]) == 0
    assert (now(store, batch).completed, now(store, batch).failed) == (1, 0)


def test_expired_lease_can_be_leased_again(store: BatchStore, clock: Clock) -> None:
    batch = accepted(store, "a")
    [late] = store.lease(1, lease_s=10)
    assert store.lease(1) == []
    clock.now_s += 11
    [other] = store.lease(1)
    assert other.place == late.place and other.token != late.token
    assert store.settle([outcome(late)]) == 0
    assert store.renew([late, other]) == {other.token}
    store.release([late])
    assert store.settle([outcome(other)]) == 1
    assert now(store, batch).completed == 1


def test_renew_extends_and_release_returns_a_lease(store: BatchStore, clock: Clock) -> None:
    accepted(store, "a")
    [lease] = store.lease(1, lease_s=10)
    for _ in range(5):
        clock.now_s += 9
        assert store.renew([lease], lease_s=10) == {lease.token}
        assert store.lease(1) == []
    store.release([lease])
    [again] = store.lease(1)
    assert again.text == lease.text and b'"custom_id": "a"' in again.text


def test_expired_batch_keeps_its_results(store: BatchStore, clock: Clock) -> None:
    batch = accepted(store, "a", "b", "c", window_s=100)
    first, second = store.lease(2)
    store.settle([outcome(first)])
    clock.now_s += 101
    assert store.lease(5) == []
    store.sweep()
    batch = now(store, batch)
    assert (batch.status, batch.completed, batch.failed) == ("expired", 1, 2)
    found = {line["custom_id"]: line.get("error") for _, line in results(store, batch)}
    assert found["a"] is None and found["b"]["code"] == found["c"]["code"] == "batch_expired"
    assert store.settle([outcome(second)]) == 0 and store.renew([second]) == set()


def test_cancelling_lets_running_requests_finish(store: BatchStore) -> None:
    batch = accepted(store, "a", "b")
    [lease] = store.lease(1)
    assert store.cancel(batch.id) and not store.cancel(batch.id)
    store.sweep()
    assert now(store, batch).status == "cancelling" and store.lease(5) == []
    assert store.settle([outcome(lease)]) == 1
    store.sweep()
    batch = now(store, batch)
    assert (batch.status, batch.completed, batch.failed) == ("cancelled", 1, 1)
    [(_, line)] = [result for result in results(store, batch) if result[0] == "error"]
    assert line["error"]["code"] == "batch_cancelled" and line["response"] is None


def test_cancelling_waits_for_a_limited_time(store: BatchStore, clock: Clock) -> None:
    batch = accepted(store, "a")
    [lease] = store.lease(1, lease_s=1e9)
    store.cancel(batch.id)
    clock.now_s += CANCEL_GRACE_S
    store.sweep()
    assert now(store, batch).status == "cancelled" and store.settle([outcome(lease)]) == 0


def test_finished_batch_cannot_be_cancelled(store: BatchStore) -> None:
    batch = accepted(store, "a")
    store.settle([outcome(lease) for lease in store.lease(1)])
    assert not store.cancel(batch.id)
    store.sweep()
    assert not store.cancel(batch.id) and not store.accept(batch.id, [], None)


def test_cancelled_batch_is_not_validated(store: BatchStore) -> None:
    batch = created(store, "a")
    assert store.cancel(batch.id)
    assert not store.accept(batch.id, [], None) and not store.reject(batch.id, [])
    store.sweep()
    batch = now(store, batch)
    assert batch.status == "cancelled" and batch.output_file_id is batch.error_file_id is None


def test_request_that_crashes_the_process_repeatedly_fails(store: BatchStore, clock: Clock) -> None:
    batch = accepted(store, "poison", "good")
    for _ in range(MAX_LEASES):
        poison, *good = store.lease(2, lease_s=1)
        assert poison.custom_id == "poison"
        store.release(good)
        clock.now_s += 2
    [good_lease] = store.lease(2)
    assert good_lease.custom_id == "good"
    store.settle([outcome(good_lease)])
    store.sweep()
    clock.now_s += 2
    store.sweep()
    batch = now(store, batch)
    assert (batch.status, batch.completed, batch.failed) == ("completed", 1, 1)


def test_leases_of_dead_processes_are_released_at_once(tmp_path: Path) -> None:
    path = tmp_path / "batches.sqlite"
    script = "from ridgeline.serve.batch.lease_owner import this_process; print(this_process())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    dead = done.stdout.strip()
    assert is_gone(dead) and not is_gone(this_process())
    assert not is_gone("elsewhere/1:7:3") and not is_gone("unknown:3")
    theirs, ours = BatchStore(path, owner=dead), BatchStore(path)
    accepted(ours, "a", "b")
    assert len(theirs.lease(1)) == 1 and len(ours.lease(1)) == 1
    theirs.close()
    assert ours.recover() == 1
    assert [lease.custom_id for lease in ours.lease(5)] == ["a"]
    ours.close()


def test_failed_transaction_is_rolled_back(store: BatchStore) -> None:
    batch = accepted(store, "a")
    [lease] = store.lease(1)
    bad = outcome(lease, succeeded=False)
    with pytest.raises(sqlite3.IntegrityError), store._db.transaction() as db:
        db.execute("UPDATE lines SET state = 'succeeded'")
        db.execute("UPDATE batches SET completed = 5")
    assert store.settle([bad]) == 1 and now(store, batch).failed == 1


def test_commits_are_durable(store: BatchStore) -> None:
    with store._db.reading() as db:
        assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert db.execute("PRAGMA synchronous").fetchone()[0] == 2


def test_pages_are_ordered_newest_first(store: BatchStore) -> None:
    ids = [created(store, "a").id for _ in range(5)]
    assert [batch.id for batch in store.page(limit=2)] == [ids[4], ids[3]]
    assert [batch.id for batch in store.page(after=ids[3], limit=9)] == ids[2::-1]
    first, second, *_ = store.files.page(purpose="batch", after=None, limit=9, newest_first=False)
    assert store.files.page(purpose="batch", after=first.id, limit=1, newest_first=False) == [
        second
    ]


def test_files_of_any_length_are_read_back(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 10)
    text = bytes(range(35))
    making = store.files.begin()
    for start in range(0, 35, 7):
        making.write(text[start : start + 7])
    assert store.files.page(purpose=None, after=None, limit=9) == []
    file = making.finish("a.bin", "batch", None)
    assert b"".join(store.files.content(file)) == text and file.num_bytes == 35
    for first in range(35):
        for length in range(1, 35 - first):
            assert store.files.read(file.id, first, length) == text[first : first + length]


def test_dropped_and_interrupted_uploads_leave_nothing(store: BatchStore) -> None:
    dropped, cut = store.files.begin(), store.files.begin()
    for making in (dropped, cut):
        making.write(b"x" * (files.CHUNK_BYTES + 1))
    dropped.drop()
    store.recover()
    with store._db.reading() as db:
        assert db.execute("SELECT count(*) FROM files").fetchone()[0] == 0
        assert db.execute("SELECT count(*) FROM chunks").fetchone()[0] == 0


def test_file_in_use_is_not_deleted(store: BatchStore) -> None:
    batch = accepted(store, "a")
    used = store.files.get(batch.input_file_id)
    assert used is not None and not store.files.delete(used)
    store.settle([outcome(lease) for lease in store.lease(1)])
    store.sweep()
    assert store.files.delete(used) and store.files.get(used.id) is None
    batch = now(store, batch)
    output = store.files.get(batch.output_file_id or "")
    assert output is not None and store.files.delete(output)
    assert b"".join(store.files.content(output)) == b""


def test_output_files_expire(store: BatchStore, clock: Clock) -> None:
    batch = accepted(store, "a", output_expires_after_s=3600)
    store.settle([outcome(lease) for lease in store.lease(1)])
    store.sweep()
    assert len(results(store, now(store, batch))) == 1
    clock.now_s += 3601
    store.sweep()
    assert results(store, now(store, batch)) == []


def test_other_files_are_not_opened_as_a_store(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"these are my notes, keep them" * 100)
    with pytest.raises(BadInput, match="batch store cannot be opened"):
        BatchStore(path)
    assert path.read_bytes().startswith(b"these are my notes")


def test_lease_has_the_line_as_it_was_sent(store: BatchStore) -> None:
    odd = request("ü\n1")
    file_id = upload(store, b"\n" + jsonl(odd, request("b")).rstrip(b"\n"))
    file = store.files.get(file_id)
    assert file is not None and file.num_bytes == len(jsonl(odd, request("b")))
