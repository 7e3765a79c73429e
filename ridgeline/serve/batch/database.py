"""The SQLite file: its tables, and a connection whose commits are durable when they return.

WAL lets readers continue while a result is written; `synchronous=FULL` makes every commit wait for
the disk, so that a settled request stays settled after a power failure. There is one connection per
process and one block of statements at a time (`Database.transaction` holds a lock), because SQLite
allows one writer anyway.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from ridgeline.errors import BadInput
from ridgeline.serve.batch.records import STATUSES

VERSION = 3

_TABLES = f"""
CREATE TABLE files (
  serial INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  filename TEXT NOT NULL,
  purpose TEXT NOT NULL,
  num_bytes INTEGER NOT NULL,
  created_at INTEGER NOT NULL,
  expires_at INTEGER,
  complete INTEGER NOT NULL CHECK (complete IN (0, 1)),
  batch_id TEXT,                    -- output and error files: their content is the batch's results
  lines_in TEXT CHECK (lines_in IN ('succeeded', 'failed')),
  tenant TEXT NOT NULL DEFAULT ''   -- the name of the key it belongs to
);
CREATE TABLE chunks (               -- of uploaded files: all of the same size, but the last
  file_id TEXT NOT NULL REFERENCES files (id) ON DELETE CASCADE,
  place INTEGER NOT NULL,
  data BLOB NOT NULL,
  PRIMARY KEY (file_id, place)
) WITHOUT ROWID;
CREATE TABLE batches (
  serial INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  status TEXT NOT NULL CHECK (status IN {STATUSES}),
  endpoint TEXT NOT NULL,
  input_file_id TEXT NOT NULL,
  completion_window TEXT NOT NULL,
  metadata TEXT,
  output_expires_after_s INTEGER,
  price_factor REAL NOT NULL,
  created_at INTEGER NOT NULL,
  expires_at INTEGER NOT NULL,
  in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER,
  expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
  output_file_id TEXT,
  error_file_id TEXT,
  errors TEXT,
  model TEXT,
  total INTEGER NOT NULL DEFAULT 0,
  completed INTEGER NOT NULL DEFAULT 0,
  failed INTEGER NOT NULL DEFAULT 0,
  prompt_tokens INTEGER NOT NULL DEFAULT 0,
  cached_tokens INTEGER NOT NULL DEFAULT 0,
  completion_tokens INTEGER NOT NULL DEFAULT 0,
  tenant TEXT NOT NULL DEFAULT '',
  CHECK (completed + failed <= total)
);
CREATE TABLE lines (
  batch_id TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
  place INTEGER NOT NULL,
  custom_id TEXT NOT NULL,
  first_byte INTEGER NOT NULL,      -- of the input file
  num_bytes INTEGER NOT NULL,
  state TEXT NOT NULL DEFAULT 'pending'
    CHECK (state IN ('pending', 'leased', 'succeeded', 'failed')),
  lease TEXT,                       -- the token that settling it requires
  owner TEXT,
  leased_until REAL,
  num_leases INTEGER NOT NULL DEFAULT 0,
  result BLOB,
  progress BLOB,                    -- tokens so far, as MessagePack: another process continues
  PRIMARY KEY (batch_id, place),
  UNIQUE (batch_id, custom_id)
);
CREATE INDEX open_lines ON lines (batch_id, place) WHERE state IN ('pending', 'leased');
PRAGMA user_version = {VERSION};
"""

_MIGRATIONS = {
    1: """
ALTER TABLE files ADD COLUMN tenant TEXT NOT NULL DEFAULT '';
ALTER TABLE batches ADD COLUMN tenant TEXT NOT NULL DEFAULT '';
PRAGMA user_version = 2;
""",
    2: """
ALTER TABLE lines ADD COLUMN progress BLOB;
PRAGMA user_version = 3;
""",
}
"""Statements that migrate from a version to the next."""


class Database:
    """One open store; BadInput if `path` cannot be opened. A missing file is created."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        try:
            # Prompts and answers of all tenants: SQLite gives -wal and -shm the same permissions.
            path.touch(mode=0o600)
            self._connection = sqlite3.connect(
                path, timeout=30, isolation_level=None, check_same_thread=False
            )
            self._connection.row_factory = sqlite3.Row
            self._prepare()
        except (sqlite3.DatabaseError, OSError) as error:
            raise BadInput(
                f"the batch store cannot be opened: {error}",
                value=str(path),
                fix="name a writable SQLite file, or a new file",
            ) from None

    def _prepare(self) -> None:
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            self._connection.execute(f"PRAGMA {pragma}")
        with self.transaction() as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                for statement in _statements(_TABLES):
                    db.execute(statement)
            while version in _MIGRATIONS:
                for statement in _statements(_MIGRATIONS[version]):
                    db.execute(statement)
                version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, VERSION):
                raise BadInput(
                    "the batch store was written by another version of Ridgeline",
                    value=version,
                    limit=VERSION,
                )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of the block is durable when it ends, or none of it happened."""
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                if self._connection.in_transaction:  # a full disk has ended it already
                    self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A block of statements that only read."""
        with self._lock:
            yield self._connection

    def used_bytes(self) -> int:
        """Bytes on the disk, without free pages."""
        with self.reading() as db:
            pages, free, size = (
                db.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
        return int((pages - free) * size)

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def _statements(script: str) -> Iterator[str]:
    """The statements of a script: `executescript` would commit the transaction that it runs in."""
    rest = ""
    for line in script.splitlines(keepends=True):
        rest += line
        if sqlite3.complete_statement(rest):
            yield rest
            rest = ""
