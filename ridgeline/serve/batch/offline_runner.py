"""Run a file of requests without a server: the same store and worker, and one batch.

The store is kept next to the output until everything is done, so that the same call continues after
a crash. It records the digest of its input: it is never continued with another file.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from starlette.types import ASGIApp

from ridgeline.errors import BadInput
from ridgeline.serve.batch.executor import InProcessExecutor
from ridgeline.serve.batch.files import CHUNK_BYTES
from ridgeline.serve.batch.records import MAX_FILE_BYTES, BatchJob, InputFileError, NewBatch
from ridgeline.serve.batch.store import BatchStore
from ridgeline.serve.batch.validate import validate_file
from ridgeline.serve.batch.worker import BatchWorker, WorkerOptions

_WINDOW_S = 10 * 365 * 86_400
_POLL_S = 0.2
ProgressCallback = Callable[[BatchJob], None]


class _FirstLine(msgspec.Struct):
    """The part of the first line that decides the endpoint of the file."""

    url: str


class OfflineJob(msgspec.Struct, frozen=True):
    """A validated file: its endpoint, the models that it names, and its digest."""

    path: Path
    endpoint: str
    models: frozenset[str | None]
    num_requests: int
    digest: str


def read_job(path: Path, endpoints: tuple[str, ...]) -> OfflineJob:
    """Validate the whole file; BadInput that names its first errors."""
    if not path.is_file():
        raise BadInput("the file does not exist", value=str(path))
    if path.stat().st_size > MAX_FILE_BYTES:
        raise BadInput("the file is too large", value=path.stat().st_size, limit=MAX_FILE_BYTES)
    endpoint = _endpoint(path)
    if endpoint not in endpoints:
        raise BadInput("the url of the first line is not served", value=endpoint, limit=endpoints)
    validated = validate_file(_pieces(path), endpoint)
    if validated.errors:
        raise BadInput(_summary(validated.errors), value=str(path))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return OfflineJob(path, endpoint, validated.models, len(validated.lines), digest)


async def run_job(
    job: OfflineJob,
    output: Path,
    app: ASGIApp,
    *,
    max_concurrency: int,
    on_progress: ProgressCallback,
    served: str = "",
) -> BatchJob:
    """Run the job's requests, continuing an interrupted call, and write the results.

    `on_progress` gets the batch several times per second. `served`: what tells the model from
    others, so that interrupted requests continue from their tokens. BadInput if the store next to
    `output` belongs to another file.
    """
    store = BatchStore(store_path(output))
    try:
        batch = _earlier_batch(job, output, store) or _new_batch(job, store)
        options = WorkerOptions(max_concurrency=max_concurrency, poll_s=_POLL_S)
        worker = BatchWorker(store, InProcessExecutor(app, served=served), options)
        watching = asyncio.ensure_future(_watch(store, batch.id, on_progress))
        try:
            await worker.run_until_idle()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        batch = _current(store, batch.id)
        on_progress(batch)
        _write(store, output, batch.output_file_id)
        _write(store, errors_path(output), batch.error_file_id)
    finally:
        store.close()
    for suffix in ("", "-wal", "-shm"):
        path = store_path(output)
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return batch


def store_path(output: Path) -> Path:
    """The store of an unfinished run."""
    return output.with_name(output.name + ".sqlite")


def errors_path(output: Path) -> Path:
    """Where failed requests are written: `answers.jsonl` → `answers.errors.jsonl`."""
    return output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}")


def _earlier_batch(job: OfflineJob, output: Path, store: BatchStore) -> BatchJob | None:
    """The batch of an interrupted run of the same file."""
    for batch in store.page(limit=1):
        if (batch.metadata or {}).get("sha256") != job.digest:
            raise BadInput(
                "the store next to the output belongs to another input file",
                value=str(store_path(output)),
                fix="choose another --output, or delete the store",
            )
        return batch
    return None


def _new_batch(job: OfflineJob, store: BatchStore) -> BatchJob:
    upload = store.files.begin()
    for piece in _pieces(job.path):
        upload.write(piece)
    file = upload.finish(job.path.name, "batch", None)
    new = NewBatch(
        input_file_id=file.id,
        endpoint=job.endpoint,
        completion_window="none",
        window_s=_WINDOW_S,
        metadata={"sha256": job.digest},
    )
    return store.create(new)


async def _watch(store: BatchStore, batch_id: str, on_progress: ProgressCallback) -> None:
    while True:
        on_progress(await asyncio.to_thread(_current, store, batch_id))
        await asyncio.sleep(_POLL_S)


def _current(store: BatchStore, batch_id: str) -> BatchJob:
    batch = store.get(batch_id)
    assert batch is not None
    return batch


def _write(store: BatchStore, target: Path, file_id: str | None) -> None:
    """Write a file completely or not at all; without one, delete that of an earlier run."""
    file = None if file_id is None else store.files.get(file_id)
    if file is None:
        target.unlink(missing_ok=True)
        return
    partial = target.with_name(target.name + ".part")
    with partial.open("wb") as opened:
        for piece in store.files.content(file):
            opened.write(piece)
    partial.replace(target)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece


def _endpoint(path: Path) -> str:
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                try:
                    return msgspec.json.decode(line, type=_FirstLine).url
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise BadInput(f"line 1 is not a batch request: {error}") from None
    raise BadInput("the file has no requests", value=str(path))


def _summary(errors: list[InputFileError]) -> str:
    first = "; ".join(f"line {error.line}: {error.message}" for error in errors[:3])
    return f"{first} (and {len(errors) - 3} more)" if len(errors) > 3 else first
