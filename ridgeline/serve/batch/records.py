"""Records of the batch store: files, batches, batch requests and their results."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
STATUSES: tuple[BatchStatus, ...] = get_args(BatchStatus)
TRANSITIONS: dict[BatchStatus, tuple[BatchStatus, ...]] = {
    "failed": ("validating",),
    "in_progress": ("validating",),
    "finalizing": ("in_progress",),
    "completed": ("finalizing",),
    "expired": ("validating", "in_progress"),
    "cancelling": ("validating", "in_progress"),
    "cancelled": ("cancelling",),
}
"""Status → those it may follow."""

ResultKind = Literal["succeeded", "failed"]

MAX_REQUESTS = 50_000
MAX_FILE_BYTES = 200 * 1024 * 1024
PRICE_FACTOR = 0.5
"""Price of a batch token relative to an online one (as OpenAI's, Anthropic's and Gemini's)."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded file, or one made of the results of a batch. Instants are Unix seconds.

    `tenant`: the name of the key that owns it; empty without keys.
    """

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None
    batch_id: str | None
    lines_in: ResultKind | None
    tenant: str


class BatchJob(msgspec.Struct, frozen=True, kw_only=True):
    """One batch. `errors`: why its input file was rejected; `model`: of its first request."""

    id: str
    status: BatchStatus
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
    errors: list[InputFileError] | None
    model: str | None
    total: int
    completed: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tenant: str


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    tenant: str = ""


class InputFileError(msgspec.Struct, frozen=True, kw_only=True):
    """One error of an input file; `line` counts from 1 (None: the whole file)."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class InputLine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a batch request is in its input file."""

    custom_id: str
    first_byte: int
    num_bytes: int


class LeaseProgress(msgspec.Struct, kw_only=True):
    """How far a batch request has come: `tokens` of its choices, of the model `served`."""

    tokens: list[list[int]] = []
    served: str = ""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to settle one batch request, for a limited time; `text` is its line of the file.

    `progress` is that of the process which had it before, and then of this one.
    """

    batch_id: str
    endpoint: str
    place: int
    token: str
    custom_id: str
    text: bytes
    tenant: str = ""
    progress: LeaseProgress = msgspec.field(default_factory=LeaseProgress)

    @property
    def request_id(self) -> str:
        return f"batch_req_{self.batch_id.removeprefix('batch_')}_{self.place}"


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a leased batch request: `line` goes to the output file or to the error file."""

    lease: Lease
    succeeded: bool
    line: bytes
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
