"""What the store says to SQLite: each function is a part of somebody's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection, Row
from typing import Literal

import msgspec

from ridgeline.serve.batch.records import MOVES, Batch, Outcome, Status

MAX_LEASES = 10
"""A line that was being answered when the process died so many times is held to be the cause."""
COLUMNS = ", ".join(field.name for field in msgspec.structs.fields(Batch))
OPEN = "state IN ('pending', 'leased')"  # as the partial index has it, or it is not used
LINE_KINDS: tuple[Literal["succeeded", "failed"], ...] = ("succeeded", "failed")
RELEASE = "UPDATE lines SET state = 'pending', lease = NULL, owner = NULL, leased_until = NULL"


def find(db: Connection, batch_id: str) -> Row:
    found: Row = db.execute(f"SELECT {COLUMNS} FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return found


def batch_of(row: Row) -> Batch:
    values = dict(row)
    for name in ("metadata", "errors"):
        values[name] = None if values[name] is None else msgspec.json.decode(values[name])
    return msgspec.convert(values, Batch)


def move(db: Connection, batch_id: str, status: Status, now_s: int) -> bool:
    """Move a batch along `MOVES`; False where it is in no state to."""
    origins = MOVES[status]
    done = db.execute(
        f"UPDATE batches SET status = ?, {status}_at = ? WHERE id = ? "
        f"AND status IN ({', '.join('?' * len(origins))})",
        (status, now_s, batch_id, *origins),
    )
    return done.rowcount == 1


def open_lines(db: Connection, batch_id: str, now_s: float, most: int) -> Sequence[Row]:
    if most <= 0:
        return []
    return db.execute(
        "SELECT batch_id, place, custom_id, first_byte, num_bytes FROM lines "
        f"WHERE batch_id = ? AND {OPEN} "
        "AND (state = 'pending' OR leased_until <= ?) AND num_leases < ? ORDER BY place LIMIT ?",
        (batch_id, now_s, MAX_LEASES, most),
    ).fetchall()


def keep(db: Connection, outcome: Outcome) -> bool:
    lease = outcome.lease
    done = db.execute(
        "UPDATE lines SET state = ?, result = ?, lease = NULL, owner = NULL, leased_until = NULL "
        "WHERE batch_id = ? AND place = ? AND state = 'leased' AND lease = ?",
        (
            "succeeded" if outcome.succeeded else "failed",
            outcome.result,
            lease.batch_id,
            lease.place,
            lease.token,
        ),
    )
    return done.rowcount == 1


def count(db: Connection, batch_id: str, outcomes: Sequence[Outcome]) -> None:
    num_succeeded = sum(outcome.succeeded for outcome in outcomes)
    db.execute(
        "UPDATE batches SET completed = completed + ?, failed = failed + ?, "
        "prompt_tokens = prompt_tokens + ?, cached_tokens = cached_tokens + ?, "
        "completion_tokens = completion_tokens + ? WHERE id = ?",
        (
            num_succeeded,
            len(outcomes) - num_succeeded,
            sum(outcome.prompt_tokens for outcome in outcomes),
            sum(outcome.cached_tokens for outcome in outcomes),
            sum(outcome.completion_tokens for outcome in outcomes),
            batch_id,
        ),
    )


def end_if_done(db: Connection, batch_id: str, now_s: int) -> None:
    row = db.execute(
        "SELECT completed + failed = total AS done FROM batches WHERE id = ?", (batch_id,)
    ).fetchone()
    if row["done"]:
        move(db, batch_id, "finalizing", now_s)


def fail_open_lines(
    db: Connection,
    batch_id: str,
    code: str,
    message: str,
    also: str = "",
    values: tuple[float, ...] = (),
) -> None:
    """Open lines of a batch (of those, the ones for which `also` holds) fail unanswered."""
    rows = db.execute(
        f"SELECT place, custom_id FROM lines WHERE batch_id = ? AND {OPEN} {also}",
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
