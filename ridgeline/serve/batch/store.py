"""Batches and their lines: what state each is in, and who may move it.

    line      pending ──lease──▶ leased ──settle──▶ succeeded | failed
                 ▲─────────────────┘ released, expired, or its owner died

Exactly once. A line is settled by one transaction that needs the lease's token, counts it in its
batch and keeps its result, all or nothing; whoever comes second finds another token, or none, and
changes nothing. What a crash cuts off was either settled, and is on the disk, or was not, and is
leased again. A line may be *computed* twice; it is answered, counted and charged once.

A batch moves along `records.MOVES` only: every move names the states it may come from. Instants are
Unix seconds of `clock`.
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
from ridgeline.serve.batch.files import Files, add_result_file, read_range
from ridgeline.serve.batch.lease_owner import is_gone, this_process
from ridgeline.serve.batch.queries import (
    COLUMNS,
    LINE_KINDS,
    MAX_LEASES,
    OPEN,
    RELEASE,
    batch_of,
    count,
    end_if_done,
    fail_open_lines,
    find,
    keep,
    move,
    open_lines,
)
from ridgeline.serve.batch.records import (
    PRICE_FACTOR,
    Batch,
    Lease,
    Line,
    LineError,
    NewBatch,
    Outcome,
    Status,
)

LEASE_S = 60.0
CANCEL_GRACE_S = 600.0

_UNRUN: dict[str, tuple[str, str]] = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}


class Store:
    """One open batch store: `files`, and the batches themselves. Usable from any thread."""

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
        self.files = Files(self._db, clock)

    def close(self) -> None:
        self._db.close()

    @property
    def is_full(self) -> bool:
        """No more is taken in, and no more is answered, until something is deleted or expires."""
        return self.used_bytes() >= self.max_bytes

    def used_bytes(self) -> int:
        """What it holds on the disk: files, lines and results."""
        return self._db.used_bytes()

    def recover(self) -> int:
        """At a start: take back what dead processes of this machine held; how many lines."""
        self.files.drop_unfinished()
        with self._db.transaction() as db:
            rows = db.execute("SELECT DISTINCT owner FROM lines WHERE state = 'leased'").fetchall()
            gone = [row["owner"] for row in rows if is_gone(row["owner"])]
            return sum(
                db.execute(f"{RELEASE} WHERE state = 'leased' AND owner = ?", (owner,)).rowcount
                for owner in gone
            )

    # -- batches

    def create(self, new: NewBatch) -> Batch:
        """A batch that waits for validation. The caller has looked at the input file."""
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
            return batch_of(find(db, batch_id))

    def get(self, batch_id: str) -> Batch | None:
        with self._db.reading() as db:
            row = find(db, batch_id)
            return None if row is None else batch_of(row)

    def page(
        self, *, after: str | None = None, limit: int = 20, tenant: str | None = None
    ) -> list[Batch]:
        """A page, newest first, of one tenant or of all (None); `after`: the last one seen."""
        with self._db.reading() as db:
            rows = db.execute(
                f"SELECT {COLUMNS} FROM batches "
                "WHERE ifnull(serial < (SELECT serial FROM batches WHERE id = ?), 1) "
                "AND (? IS NULL OR tenant = ?) ORDER BY serial DESC LIMIT ?",
                (after, tenant, tenant, limit),
            ).fetchall()
        return [batch_of(row) for row in rows]

    def having(self, *statuses: Status) -> Sequence[Batch]:
        """Batches in one of these states, oldest first."""
        marks = ", ".join("?" * len(statuses))
        with self._db.reading() as db:
            rows = db.execute(
                f"SELECT {COLUMNS} FROM batches WHERE status IN ({marks}) ORDER BY serial",
                statuses,
            ).fetchall()
        return [batch_of(row) for row in rows]

    def cancel(self, batch_id: str) -> bool:
        """Begin to cancel; False where the batch is past that."""
        with self._db.transaction() as db:
            return move(db, batch_id, "cancelling", int(self._clock()))

    # -- validation

    def accept(self, batch_id: str, lines: Iterable[Line], model: str | None) -> bool:
        """The input is good: its lines wait to be answered. False where it was cancelled."""
        with self._db.transaction() as db:
            if not move(db, batch_id, "in_progress", int(self._clock())):
                return False
            rows = (
                (batch_id, place, line.custom_id, line.first_byte, line.num_bytes)
                for place, line in enumerate(lines)
            )
            done = db.executemany(
                "INSERT INTO lines (batch_id, place, custom_id, first_byte, num_bytes) "
                "VALUES (?, ?, ?, ?, ?)",
                rows,
            )
            db.execute(
                "UPDATE batches SET total = ?, model = ? WHERE id = ?",
                (done.rowcount, model, batch_id),
            )
            return True

    def refuse(self, batch_id: str, errors: Sequence[LineError]) -> bool:
        """The input is bad. False where the batch was cancelled meanwhile."""
        with self._db.transaction() as db:
            moved = move(db, batch_id, "failed", int(self._clock()))
            if moved:
                text = msgspec.json.encode(errors).decode()
                db.execute("UPDATE batches SET errors = ? WHERE id = ?", (text, batch_id))
            return moved

    # -- lines

    def lease(self, most: int, *, lease_s: float = LEASE_S) -> Sequence[Lease]:
        """Up to `most` open lines of the oldest batches, ours for `lease_s` seconds."""
        now_s = self._clock()
        found: list[Lease] = []
        with self._db.transaction() as db:
            batches = db.execute(
                "SELECT id, endpoint, input_file_id, tenant FROM batches "
                "WHERE status = 'in_progress' AND expires_at > ? ORDER BY serial",
                (now_s,),
            ).fetchall()
            for batch in batches:
                for row in open_lines(db, batch["id"], now_s, most - len(found)):
                    found.append(self._lease(db, batch, row, now_s + lease_s))
        return found

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
        )

    def renew(self, leases: Iterable[Lease], *, lease_s: float = LEASE_S) -> set[str]:
        """Hold them longer; the tokens of those that are still ours to settle."""
        until_s, kept = self._clock() + lease_s, set()
        with self._db.transaction() as db:
            for lease in leases:
                done = db.execute(
                    "UPDATE lines SET leased_until = ? WHERE batch_id = ? AND place = ? "
                    "AND state = 'leased' AND lease = ?",
                    (until_s, lease.batch_id, lease.place, lease.token),
                )
                if done.rowcount:
                    kept.add(lease.token)
        return kept

    def release(self, leases: Iterable[Lease]) -> None:
        """Give lines back unanswered, as if they had never been leased."""
        with self._db.transaction() as db:
            for lease in leases:
                db.execute(
                    f"{RELEASE}, num_leases = num_leases - 1 "
                    "WHERE batch_id = ? AND place = ? AND state = 'leased' AND lease = ?",
                    (lease.batch_id, lease.place, lease.token),
                )

    def settle(self, outcomes: Iterable[Outcome]) -> int:
        """Keep results; how many were taken. One whose lease is lost changes nothing."""
        taken: dict[str, list[Outcome]] = defaultdict(list)
        with self._db.transaction() as db:
            for outcome in outcomes:
                if keep(db, outcome):
                    taken[outcome.lease.batch_id].append(outcome)
            for batch_id, each in taken.items():
                count(db, batch_id, each)
                end_if_done(db, batch_id, int(self._clock()))
        return sum(map(len, taken.values()))

    # -- endings

    def sweep(self) -> None:
        """Whatever is due: batches that end, files that expire."""
        now_s = int(self._clock())
        self._give_up_poison()
        for batch in self.having("finalizing"):
            self._end(batch, "completed", now_s)
        for batch in self.having("cancelling"):
            if self._is_idle(batch) or now_s >= (batch.cancelling_at or 0) + CANCEL_GRACE_S:
                self._end(batch, "cancelled", now_s)
        for batch in self.having("validating", "in_progress"):
            if now_s >= batch.expires_at:
                self._end(batch, "expired", now_s)
        self.files.sweep()

    def _is_idle(self, batch: Batch) -> bool:
        with self._db.reading() as db:
            busy = db.execute(
                f"SELECT 1 FROM lines WHERE batch_id = ? AND {OPEN} "
                "AND state = 'leased' AND leased_until > ? LIMIT 1",
                (batch.id, self._clock()),
            ).fetchone()
        return busy is None

    def _end(self, batch: Batch, status: Status, now_s: int) -> None:
        """The last move of a batch, with its files: what was not answered says why."""
        keep_s = batch.output_expires_after_s
        expires_at = None if keep_s is None else batch.created_at + keep_s
        with self._db.transaction() as db:
            if not move(db, batch.id, status, now_s):
                return
            if status in _UNRUN:
                fail_open_lines(db, batch.id, *_UNRUN[status])
            names = [add_result_file(db, batch.id, kind, now_s, expires_at) for kind in LINE_KINDS]
            db.execute(
                "UPDATE batches SET output_file_id = ?, error_file_id = ? WHERE id = ?",
                (*names, batch.id),
            )

    def _give_up_poison(self) -> None:
        message = f"The server ended {MAX_LEASES} times while it was answering this request."
        poison = "AND num_leases >= ? AND (state = 'pending' OR leased_until <= ?)"
        values = (MAX_LEASES, self._clock())
        with self._db.transaction() as db:
            rows = db.execute(
                f"SELECT DISTINCT batch_id FROM lines WHERE {OPEN} {poison}", values
            ).fetchall()
            for row in rows:
                fail_open_lines(db, row["batch_id"], "server_error", message, poison, values)
                end_if_done(db, row["batch_id"], int(values[1]))
