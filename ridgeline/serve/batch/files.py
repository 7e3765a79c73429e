"""Files of the store: uploaded in chunks of one size, or made of the results of a batch.

An upload is invisible until `finish`; what a crash leaves behind is deleted at the next start. The
output and error files of a batch are its results in order, which are stored once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from sqlite3 import Connection, Row

from ridgeline.serve.batch.database import Database
from ridgeline.serve.batch.records import ResultKind, StoredFile

CHUNK_BYTES = 1 << 20
_COLUMNS = "id, filename, purpose, num_bytes, created_at, expires_at, batch_id, lines_in, tenant"
_RESULTS_PER_QUERY = 64


class Upload:
    """An incomplete file: `write` pieces of any size, then `finish` or `drop`."""

    def __init__(self, db: Database, file_id: str) -> None:
        self._db, self._id = db, file_id
        self._buffer, self._place, self.num_bytes = bytearray(), 0, 0

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._buffer += data
        while len(self._buffer) >= CHUNK_BYTES:
            self._put(bytes(self._buffer[:CHUNK_BYTES]))
            del self._buffer[:CHUNK_BYTES]

    def finish(self, filename: str, purpose: str, expires_at: int | None) -> StoredFile:
        """Make the file visible."""
        if self._buffer:
            self._put(bytes(self._buffer))
        with self._db.transaction() as db:
            db.execute(
                "UPDATE files SET complete = 1, num_bytes = ?, filename = ?, purpose = ?, "
                "expires_at = ? WHERE id = ?",
                (self.num_bytes, filename, purpose, expires_at, self._id),
            )
            return _file(_row(db, self._id))

    def drop(self) -> None:
        """Delete what was written."""
        with self._db.transaction() as db:
            db.execute("DELETE FROM files WHERE id = ? AND complete = 0", (self._id,))

    def _put(self, data: bytes) -> None:
        with self._db.transaction() as db:
            db.execute("INSERT INTO chunks VALUES (?, ?, ?)", (self._id, self._place, data))
        self._place += 1


class FileTable:
    """All files of a store; `clock` gives Unix seconds."""

    def __init__(self, db: Database, clock: Callable[[], float]) -> None:
        self._db, self._clock = db, clock

    def begin(self, tenant: str = "") -> Upload:
        """Begin an upload."""
        file_id = new_file_id()
        with self._db.transaction() as db:
            db.execute(
                "INSERT INTO files (id, filename, purpose, num_bytes, created_at, complete, "
                "tenant) VALUES (?, '', '', 0, ?, 0, ?)",
                (file_id, int(self._clock()), tenant),
            )
        return Upload(self._db, file_id)

    def get(self, file_id: str) -> StoredFile | None:
        with self._db.reading() as db:
            row = _row(db, file_id)
            return None if row is None else _file(row)

    def page(
        self,
        *,
        purpose: str | None,
        after: str | None,
        limit: int,
        newest_first: bool = True,
        tenant: str | None = None,
    ) -> list[StoredFile]:
        """A page of files, of one tenant or of all (None). `after`: id of the last file of the page
        before (an unknown one: from the start)."""
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        with self._db.reading() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM files WHERE complete = 1 AND (? IS NULL OR purpose = ?) "
                "AND (? IS NULL OR tenant = ?) "
                f"AND ifnull(serial {sign} (SELECT serial FROM files WHERE id = ?), 1) "
                f"ORDER BY serial {order} LIMIT ?",
                (purpose, purpose, tenant, tenant, after, limit),
            ).fetchall()
        return [_file(row) for row in rows]

    def content(self, file: StoredFile) -> Iterator[bytes]:
        """Its bytes in pieces; the store is not locked between two of them."""
        return self._chunks(file) if file.batch_id is None else self._results(file)

    def read(self, file_id: str, first_byte: int, num_bytes: int) -> bytes:
        """A range of an uploaded file."""
        with self._db.reading() as db:
            return read_range(db, file_id, first_byte, num_bytes)

    def delete(self, file: StoredFile) -> bool:
        """False if an unfinished batch still reads it.

        The results of a batch go with their file.
        """
        with self._db.transaction() as db:
            return delete_file(db, file.id, file.batch_id, file.lines_in)

    def sweep(self) -> None:
        """Delete expired files."""
        with self._db.transaction() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM files WHERE expires_at <= ?", (self._clock(),)
            ).fetchall()
            for row in rows:
                delete_file(db, row["id"], row["batch_id"], row["lines_in"])

    def drop_unfinished(self) -> None:
        """Delete uploads that a crash cut off."""
        with self._db.transaction() as db:
            db.execute("DELETE FROM files WHERE complete = 0")

    def _chunks(self, file: StoredFile) -> Iterator[bytes]:
        for place in range(-(-file.num_bytes // CHUNK_BYTES)):
            with self._db.reading() as db:
                row = db.execute(
                    "SELECT data FROM chunks WHERE file_id = ? AND place = ?", (file.id, place)
                ).fetchone()
            if row is None:
                return
            yield row["data"]

    def _results(self, file: StoredFile) -> Iterator[bytes]:
        last = -1
        while True:
            with self._db.reading() as db:
                rows = db.execute(
                    "SELECT place, result FROM lines WHERE batch_id = ? AND state = ? "
                    "AND place > ? AND result IS NOT NULL ORDER BY place LIMIT ?",
                    (file.batch_id, file.lines_in, last, _RESULTS_PER_QUERY),
                ).fetchall()
            if not rows:
                return
            last = rows[-1]["place"]
            yield b"".join(row["result"] + b"\n" for row in rows)


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def add_result_file(
    db: Connection,
    batch_id: str,
    lines_in: ResultKind,
    now_s: int,
    expires_at: int | None,
) -> str | None:
    """Make a file of a batch's results of one kind; None if there are none."""
    size = db.execute(
        "SELECT sum(length(result) + 1) FROM lines WHERE batch_id = ? AND state = ?",
        (batch_id, lines_in),
    ).fetchone()[0]
    if size is None:
        return None
    file_id, kind = new_file_id(), "output" if lines_in == "succeeded" else "error"
    db.execute(
        "INSERT INTO files (id, filename, purpose, num_bytes, created_at, expires_at, complete, "
        "batch_id, lines_in, tenant) VALUES (?, ?, 'batch_output', ?, ?, ?, 1, ?, ?, "
        "(SELECT tenant FROM batches WHERE id = ?))",
        (
            file_id,
            f"{batch_id}_{kind}.jsonl",
            size,
            now_s,
            expires_at,
            batch_id,
            lines_in,
            batch_id,
        ),
    )
    return file_id


def read_range(db: Connection, file_id: str, first_byte: int, num_bytes: int) -> bytes:
    """`num_bytes` of an uploaded file, starting at `first_byte`."""
    first = first_byte // CHUNK_BYTES
    rows = db.execute(
        "SELECT data FROM chunks WHERE file_id = ? AND place BETWEEN ? AND ? ORDER BY place",
        (file_id, first, (first_byte + num_bytes - 1) // CHUNK_BYTES),
    ).fetchall()
    start = first_byte - first * CHUNK_BYTES
    return b"".join(row["data"] for row in rows)[start : start + num_bytes]


def delete_file(db: Connection, file_id: str, batch_id: str | None, lines_in: str | None) -> bool:
    """Delete a file, and results that are only in it; False if an unfinished batch reads it."""
    reader = db.execute(
        "SELECT 1 FROM batches WHERE input_file_id = ? AND status IN "
        "('validating', 'in_progress', 'cancelling')",
        (file_id,),
    ).fetchone()
    if reader is not None:
        return False
    db.execute("DELETE FROM files WHERE id = ?", (file_id,))
    db.execute(
        "UPDATE lines SET result = NULL WHERE batch_id = ? AND state = ?", (batch_id, lines_in)
    )
    return True


def _row(db: Connection, file_id: str) -> Row:
    row: Row = db.execute(
        f"SELECT {_COLUMNS} FROM files WHERE id = ? AND complete = 1", (file_id,)
    ).fetchone()
    return row


def _file(row: Row) -> StoredFile:
    return StoredFile(**dict(row))
