"""Batches and their requests: the state of each, and its transitions.

    request   pending ──lease──▶ leased ──settle──▶ succeeded | failed
                 ▲──────────────────┘ released, expired, or its owner died

Exactly once: a request is settled by one transaction that requires the token of its lease, counts
it in its batch and stores its result, all or nothing. A second result finds another token, or none,
and changes nothing. After a crash a request was either settled, and is on the disk, or it is leased
again. It may be computed twice; it is settled, counted and charged once.

A batch moves along `records.TRANSITIONS` only. Instants are Unix seconds of `clock`.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from sqlite3 import Connection, Row

import msgspec

from ridgeline.serve.batch.database import Database
from ridgeline.serve.batch.files import FileTable, add_result_file, read_range
from ridgeline.serve.batch.lease_owner import is_gone, this_process
from ridgeline.serve.batch.records import (
    PRICE_FACTOR,
    TRANSITIONS,
    BatchJob,
    BatchResult,
    BatchStatus,
    InputFileError,
    InputLine,
    Lease,
    LeaseProgress,
    NewBatch,
    ResultKind,
)

LEASE_S = 60.0
CANCEL_GRACE_S = 600.0
MAX_LEASES = 10
"""A request during which the process ended this often is assumed to be the cause."""

_RESULT_KINDS: tuple[ResultKind, ...] = ("succeeded", "failed")
_NOT_RUN: dict[str, tuple[str, str]] = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}
_COLUMNS = ", ".join(field.name for field in msgspec.structs.fields(BatchJob))
_OPEN = "state IN ('pending', 'leased')"  # verbatim the partial index's, or SQLite does not use it
_RELEASE = "UPDATE lines SET state = 'pending', lease = NULL, owner = NULL, leased_until = NULL"


class BatchStore:
    """An open store of batches and `files`. Usable from any thread.

    `max_bytes`: the store takes no uploads and leases no requests while it is larger.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        owner: str | None = None,
        max_bytes: float = math.inf,
    ) -> None:
        self.max_bytes = max_bytes
        self._db, self._clock = Database(path), clock
        self._owner = this_process() if owner is None else owner
        self.files = FileTable(self._db, clock)

    def close(self) -> None:
        self._db.close()

    @property
    def is_full(self) -> bool:
        """Whether something has to be deleted or expire before more is stored."""
        return self.used_bytes() >= self.max_bytes

    def used_bytes(self) -> int:
        """Size on the disk: files, requests and results."""
        return self._db.used_bytes()

    def recover(self) -> int:
        """At a start, release what dead processes of this machine had leased; the number of
        requests."""
        self.files.drop_unfinished()
        with self._db.transaction() as db:
            rows = db.execute("SELECT DISTINCT owner FROM lines WHERE state = 'leased'").fetchall()
            gone = [row["owner"] for row in rows if is_gone(row["owner"])]
            return sum(
                db.execute(f"{_RELEASE} WHERE state = 'leased' AND owner = ?", (owner,)).rowcount
                for owner in gone
            )

    # batches

    def create(self, new: NewBatch) -> BatchJob:
        """A batch that waits for its input file to be validated."""
        now_s, batch_id = int(self._clock()), f"batch_{secrets.token_hex(16)}"
        metadata = None if new.metadata is None else msgspec.json.encode(new.metadata).decode()
        with self._db.transaction() as db:
            db.execute(
                "INSERT INTO batches (id, status, endpoint, input_file_id, completion_window, "
                "metadata, output_expires_after_s, price_factor, created_at, expires_at, tenant) "
                "VALUES (?, 'validating', ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    batch_id,
                    new.endpoint,
                    new.input_file_id,
                    new.completion_window,
                    metadata,
                    new.output_expires_after_s,
                    PRICE_FACTOR,
                    now_s,
                    now_s + new.window_s,
                    new.tenant,
                ),
            )
            row = _batch_row(db, batch_id)
            assert row is not None
            return _to_batch(row)

    def get(self, batch_id: str) -> BatchJob | None:
        with self._db.reading() as db:
            row = _batch_row(db, batch_id)
            return None if row is None else _to_batch(row)

    def page(
        self, *, after: str | None = None, limit: int = 20, tenant: str | None = None
    ) -> list[BatchJob]:
        """A page, newest first, of one tenant or of all (None). `after`: id of the last batch of
        the page before."""
        with self._db.reading() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM batches "
                "WHERE ifnull(serial < (SELECT serial FROM batches WHERE id = ?), 1) "
                "AND (? IS NULL OR tenant = ?) ORDER BY serial DESC LIMIT ?",
                (after, tenant, tenant, limit),
            ).fetchall()
        return [_to_batch(row) for row in rows]

    def with_status(self, *statuses: BatchStatus) -> Sequence[BatchJob]:
        """Batches in one of these states, oldest first."""
        marks = ", ".join("?" * len(statuses))
        with self._db.reading() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM batches WHERE status IN ({marks}) ORDER BY serial",
                statuses,
            ).fetchall()
        return [_to_batch(row) for row in rows]

    def cancel(self, batch_id: str) -> bool:
        """Start to cancel; False if it is too late for that."""
        with self._db.transaction() as db:
            return _transition(db, batch_id, "cancelling", int(self._clock()))

    # validation

    def accept(self, batch_id: str, lines: Iterable[InputLine], model: str | None) -> bool:
        """The input file is valid: its requests are pending. False if the batch was cancelled."""
        with self._db.transaction() as db:
            if not _transition(db, batch_id, "in_progress", int(self._clock())):
                return False
            rows = (
                (batch_id, place, line.custom_id, line.first_byte, line.num_bytes)
                for place, line in enumerate(lines)
            )
            inserted = db.executemany(
                "INSERT INTO lines (batch_id, place, custom_id, first_byte, num_bytes) "
                "VALUES (?, ?, ?, ?, ?)",
                rows,
            )
            db.execute(
                "UPDATE batches SET total = ?, model = ? WHERE id = ?",
                (inserted.rowcount, model, batch_id),
            )
            return True

    def reject(self, batch_id: str, errors: Sequence[InputFileError]) -> bool:
        """The input file is not valid. False if the batch was cancelled."""
        with self._db.transaction() as db:
            is_rejected = _transition(db, batch_id, "failed", int(self._clock()))
            if is_rejected:
                text = msgspec.json.encode(errors).decode()
                db.execute("UPDATE batches SET errors = ? WHERE id = ?", (text, batch_id))
            return is_rejected

    # requests

    def lease(self, max_requests: int, *, lease_s: float = LEASE_S) -> Sequence[Lease]:
        """Lease up to `max_requests` open requests of the oldest batches for `lease_s` seconds."""
        now_s = self._clock()
        leases: list[Lease] = []
        with self._db.transaction() as db:
            batches = db.execute(
                "SELECT id, endpoint, input_file_id, tenant FROM batches "
                "WHERE status = 'in_progress' AND expires_at > ? ORDER BY serial",
                (now_s,),
            ).fetchall()
            for batch in batches:
                for row in _open_requests(db, batch["id"], now_s, max_requests - len(leases)):
                    leases.append(self._lease(db, batch, row, now_s + lease_s))
        return leases

    def _lease(self, db: Connection, batch: Row, row: Row, until_s: float) -> Lease:
        token = secrets.token_hex(16)
        db.execute(
            "UPDATE lines SET state = 'leased', lease = ?, owner = ?, leased_until = ?, "
            "num_leases = num_leases + 1 WHERE batch_id = ? AND place = ?",
            (token, self._owner, until_s, row["batch_id"], row["place"]),
        )
        return Lease(
            batch_id=batch["id"],
            endpoint=batch["endpoint"],
            place=row["place"],
            token=token,
            custom_id=row["custom_id"],
            text=read_range(db, batch["input_file_id"], row["first_byte"], row["num_bytes"]),
            tenant=batch["tenant"],
            progress=_decode_progress(row["progress"]),
        )

    def renew(self, leases: Iterable[Lease], *, lease_s: float = LEASE_S) -> set[str]:
        """Extend leases, and keep the progress of their requests; the tokens of those that are
        still valid."""
        until_s, tokens = self._clock() + lease_s, set()
        with self._db.transaction() as db:
            for lease in leases:
                updated = db.execute(
                    "UPDATE lines SET leased_until = ?, progress = ? "
                    "WHERE batch_id = ? AND place = ? AND state = 'leased' AND lease = ?",
                    (until_s, _encode_progress(lease), lease.batch_id, lease.place, lease.token),
                )
                if updated.rowcount:
                    tokens.add(lease.token)
        return tokens

    def release(self, leases: Iterable[Lease]) -> None:
        """Make requests pending again, with the progress that they have made."""
        with self._db.transaction() as db:
            for lease in leases:
                db.execute(
                    f"{_RELEASE}, num_leases = num_leases - 1, progress = ? "
                    "WHERE batch_id = ? AND place = ? AND state = 'leased' AND lease = ?",
                    (_encode_progress(lease), lease.batch_id, lease.place, lease.token),
                )

    def settle(self, results: Iterable[BatchResult]) -> int:
        """Store results; how many were accepted. One whose lease is no longer valid is dropped."""
        accepted: dict[str, list[BatchResult]] = defaultdict(list)
        with self._db.transaction() as db:
            for result in results:
                if _store_result(db, result):
                    accepted[result.lease.batch_id].append(result)
            for batch_id, batch_results in accepted.items():
                _count_results(db, batch_id, batch_results)
                _finalize_if_complete(db, batch_id, int(self._clock()))
        return sum(map(len, accepted.values()))

    # ends

    def sweep(self) -> None:
        """End the batches that are due, and delete expired files."""
        now_s = int(self._clock())
        self._fail_crashing_requests()
        for batch in self.with_status("finalizing"):
            self._end(batch, "completed", now_s)
        for batch in self.with_status("cancelling"):
            if self._is_idle(batch) or now_s >= (batch.cancelling_at or 0) + CANCEL_GRACE_S:
                self._end(batch, "cancelled", now_s)
        for batch in self.with_status("validating", "in_progress"):
            if now_s >= batch.expires_at:
                self._end(batch, "expired", now_s)
        self.files.sweep()

    def _is_idle(self, batch: BatchJob) -> bool:
        with self._db.reading() as db:
            running = db.execute(
                f"SELECT 1 FROM lines WHERE batch_id = ? AND {_OPEN} "
                "AND state = 'leased' AND leased_until > ? LIMIT 1",
                (batch.id, self._clock()),
            ).fetchone()
        return running is None

    def _end(self, batch: BatchJob, status: BatchStatus, now_s: int) -> None:
        """The last transition of a batch: fail what did not run, and make its files."""
        keep_s = batch.output_expires_after_s
        expires_at = None if keep_s is None else batch.created_at + keep_s
        with self._db.transaction() as db:
            if not _transition(db, batch.id, status, now_s):
                return
            if status in _NOT_RUN:
                _fail_open_requests(db, batch.id, *_NOT_RUN[status])
            file_ids = [
                add_result_file(db, batch.id, kind, now_s, expires_at) for kind in _RESULT_KINDS
            ]
            db.execute(
                "UPDATE batches SET output_file_id = ?, error_file_id = ? WHERE id = ?",
                (*file_ids, batch.id),
            )

    def _fail_crashing_requests(self) -> None:
        message = f"The server ended {MAX_LEASES} times while it was running this request."
        is_crashing = "AND num_leases >= ? AND (state = 'pending' OR leased_until <= ?)"
        now_s = self._clock()
        values = (MAX_LEASES, now_s)
        with self._db.transaction() as db:
            rows = db.execute(
                f"SELECT DISTINCT batch_id FROM lines WHERE {_OPEN} {is_crashing}", values
            ).fetchall()
            for row in rows:
                batch_id = row["batch_id"]
                _fail_open_requests(db, batch_id, "server_error", message, is_crashing, values)
                _finalize_if_complete(db, batch_id, int(now_s))


# parts of the transactions above


def _batch_row(db: Connection, batch_id: str) -> Row | None:
    row: Row | None = db.execute(
        f"SELECT {_COLUMNS} FROM batches WHERE id = ?", (batch_id,)
    ).fetchone()
    return row


def _to_batch(row: Row) -> BatchJob:
    values = dict(row)
    for name in ("metadata", "errors"):
        values[name] = None if values[name] is None else msgspec.json.decode(values[name])
    return msgspec.convert(values, BatchJob)


def _transition(db: Connection, batch_id: str, status: BatchStatus, now_s: int) -> bool:
    """Move a batch along `TRANSITIONS`; False if its status does not allow it."""
    origins = TRANSITIONS[status]
    updated = db.execute(
        f"UPDATE batches SET status = ?, {status}_at = ? WHERE id = ? "
        f"AND status IN ({', '.join('?' * len(origins))})",
        (status, now_s, batch_id, *origins),
    )
    return updated.rowcount == 1


def _open_requests(db: Connection, batch_id: str, now_s: float, max_requests: int) -> Sequence[Row]:
    if max_requests <= 0:
        return []
    return db.execute(
        "SELECT batch_id, place, custom_id, first_byte, num_bytes, progress FROM lines "
        f"WHERE batch_id = ? AND {_OPEN} "
        "AND (state = 'pending' OR leased_until <= ?) AND num_leases < ? ORDER BY place LIMIT ?",
        (batch_id, now_s, MAX_LEASES, max_requests),
    ).fetchall()


def _encode_progress(lease: Lease) -> bytes | None:
    """None for a request without a token."""
    return msgspec.msgpack.encode(lease.progress) if any(lease.progress.tokens) else None


def _decode_progress(data: bytes | None) -> LeaseProgress:
    return LeaseProgress() if data is None else msgspec.msgpack.decode(data, type=LeaseProgress)


def _store_result(db: Connection, result: BatchResult) -> bool:
    lease = result.lease
    updated = db.execute(
        "UPDATE lines SET state = ?, result = ?, lease = NULL, owner = NULL, leased_until = NULL, "
        "progress = NULL WHERE batch_id = ? AND place = ? AND state = 'leased' AND lease = ?",
        (
            "succeeded" if result.succeeded else "failed",
            result.line,
            lease.batch_id,
            lease.place,
            lease.token,
        ),
    )
    return updated.rowcount == 1


def _count_results(db: Connection, batch_id: str, results: Sequence[BatchResult]) -> None:
    num_succeeded = sum(result.succeeded for result in results)
    db.execute(
        "UPDATE batches SET completed = completed + ?, failed = failed + ?, "
        "prompt_tokens = prompt_tokens + ?, cached_tokens = cached_tokens + ?, "
        "completion_tokens = completion_tokens + ? WHERE id = ?",
        (
            num_succeeded,
            len(results) - num_succeeded,
            sum(result.prompt_tokens for result in results),
            sum(result.cached_tokens for result in results),
            sum(result.completion_tokens for result in results),
            batch_id,
        ),
    )


def _finalize_if_complete(db: Connection, batch_id: str, now_s: int) -> None:
    row = db.execute(
        "SELECT completed + failed = total AS is_complete FROM batches WHERE id = ?", (batch_id,)
    ).fetchone()
    if row["is_complete"]:
        _transition(db, batch_id, "finalizing", now_s)


def _fail_open_requests(
    db: Connection,
    batch_id: str,
    code: str,
    message: str,
    condition: str = "",
    values: tuple[float, ...] = (),
) -> None:
    """Fail the open requests of a batch for which `condition` holds, without running them."""
    rows = db.execute(
        f"SELECT place, custom_id FROM lines WHERE batch_id = ? AND {_OPEN} {condition}",
        (batch_id, *values),
    ).fetchall()
    for row in rows:
        result = {
            "id": f"batch_req_{batch_id.removeprefix('batch_')}_{row['place']}",
            "custom_id": row["custom_id"],
            "response": None,
            "error": {"code": code, "message": message},
        }
        db.execute(
            "UPDATE lines SET state = 'failed', result = ?, lease = NULL, owner = NULL, "
            "leased_until = NULL WHERE batch_id = ? AND place = ?",
            (msgspec.json.encode(result), batch_id, row["place"]),
        )
    db.execute("UPDATE batches SET failed = failed + ? WHERE id = ?", (len(rows), batch_id))
