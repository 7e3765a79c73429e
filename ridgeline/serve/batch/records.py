"""What the store holds, as frozen records: files, batches, lines and their outcomes."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
STATUSES: tuple[Status, ...] = get_args(Status)
MOVES: dict[Status, tuple[Status, ...]] = {
    "failed": ("validating",),
    "in_progress": ("validating",),
    "finalizing": ("in_progress",),
    "completed": ("finalizing",),
    "expired": ("validating", "in_progress"),
    "cancelling": ("validating", "in_progress"),
    "cancelled": ("cancelling",),
}
"""Status → those it may follow."""

MAX_LINES = 50_000
MAX_FILE_BYTES = 200 * 1024 * 1024
PRICE_FACTOR = 0.5
"""A batch token is charged at this share of an online one (OpenAI, Anthropic, Gemini alike)."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded file, or one made of a batch's lines. Instants are Unix seconds.

    `tenant`: the name of the key that it belongs to; empty where nobody was asked for a key.
    """

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None
    batch_id: str | None
    lines_in: Literal["succeeded", "failed"] | None
    tenant: str


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch as it stands. `errors`: why validation refused it; `model`: its first line's."""

    id: str
    status: Status
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    output_expires_after_s: int | None
    price_factor: float
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    output_file_id: str | None
    error_file_id: str | None
    errors: list[LineError] | None
    model: str | None
    total: int
    completed: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tenant: str


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked for, checked."""

    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    tenant: str = ""


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """One complaint about an input file; `line` counts from 1 (None: the whole file)."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request lies in its input file."""

    custom_id: str
    first_byte: int
    num_bytes: int


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to settle one line, until it ends; `text` is the line as it was sent."""

    batch_id: str
    endpoint: str
    place: int
    token: str
    custom_id: str
    text: bytes
    tenant: str = ""

    @property
    def request_id(self) -> str:
        return f"batch_req_{self.batch_id.removeprefix('batch_')}_{self.place}"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a leased line: a line of the output file or of the error file."""

    lease: Lease
    succeeded: bool
    result: bytes
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
