"""A file of requests answered without a server: the same store, the same worker, one batch.

The store lies beside the output until all is done, so that the same call goes on after a crash. It
remembers the digest of its input: another file's answers are never taken for this one's.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from starlette.types import ASGIApp

from ridgeline.errors import BadInput
from ridgeline.serve.batch.executor import InProcess
from ridgeline.serve.batch.files import CHUNK_BYTES
from ridgeline.serve.batch.records import MAX_FILE_BYTES, Batch, LineError, NewBatch
from ridgeline.serve.batch.store import Store
from ridgeline.serve.batch.validate import Checked, check
from ridgeline.serve.batch.worker import Worker, WorkerOptions

_WINDOW_S = 10 * 365 * 86_400
_LOOK_S = 0.2
Progress = Callable[[Batch], None]


class Request(msgspec.Struct):
    """What decides the endpoint of a file: its first line's url."""

    url: str


class Job(msgspec.Struct, frozen=True):
    """A checked file: what it asks of which endpoint and models, and its digest."""

    path: Path
    endpoint: str
    models: frozenset[str | None]
    num_lines: int
    digest: str


def read_job(path: Path, endpoints: tuple[str, ...]) -> Job:
    """Check the whole file; BadInput that names its first mistakes."""
    if not path.is_file():
        raise BadInput("there is no such file", value=str(path))
    if path.stat().st_size > MAX_FILE_BYTES:
        raise BadInput("the file is too large", value=path.stat().st_size, limit=MAX_FILE_BYTES)
    endpoint = _endpoint(path)
    if endpoint not in endpoints:
        raise BadInput("the first line's url is not served", value=endpoint, limit=endpoints)
    found: Checked = check(_pieces(path), endpoint)
    if found.errors:
        raise BadInput(_told(found.errors), value=str(path))
    with path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return Job(path, endpoint, found.models, len(found.lines), digest)


async def answer_file(
    job: Job, output: Path, app: ASGIApp, *, most: int, progress: Progress
) -> Batch:
    """Answer the job's lines, from where an earlier call was cut off, and put the results in place.

    `progress` is told now and then how the batch stands. BadInput where the store beside `output`
    belongs to another file.
    """
    store = Store(store_of(output))
    try:
        batch = _batch_of(job, output, store) or _begin(job, store)
        worker = Worker(store, InProcess(app), WorkerOptions(most=most, beat_s=_LOOK_S))
        watching = asyncio.ensure_future(_watch(store, batch.id, progress))
        try:
            await worker.run_until_idle()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        batch = _now(store, batch.id)
        progress(batch)
        for target, file_id in (
            (output, batch.output_file_id),
            (errors_of(output), batch.error_file_id),
        ):
            _write(store, target, file_id)
    finally:
        store.close()
    for path in _store_files(output):
        path.unlink(missing_ok=True)
    return batch


def store_of(output: Path) -> Path:
    return output.with_name(output.name + ".sqlite")


def errors_of(output: Path) -> Path:
    """Where failed lines go: `answers.jsonl` → `answers.errors.jsonl`."""
    return output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}")


def _store_files(output: Path) -> Iterator[Path]:
    store = store_of(output)
    for end in ("", "-wal", "-shm"):
        yield store.with_name(store.name + end)


def _batch_of(job: Job, output: Path, store: Store) -> Batch | None:
    """The batch of an earlier call on the same file."""
    for batch in store.page(limit=1):
        if (batch.metadata or {}).get("sha256") != job.digest:
            raise BadInput(
                "the store beside the output belongs to another input",
                value=str(store_of(output)),
                fix="choose another --output, or remove the store",
            )
        return batch
    return None


def _begin(job: Job, store: Store) -> Batch:
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


async def _watch(store: Store, batch_id: str, progress: Progress) -> None:
    while True:
        progress(await asyncio.to_thread(_now, store, batch_id))
        await asyncio.sleep(_LOOK_S)


def _now(store: Store, batch_id: str) -> Batch:
    batch = store.get(batch_id)
    assert batch is not None
    return batch


def _write(store: Store, target: Path, file_id: str | None) -> None:
    """All of the file or nothing of it; without one, what an earlier run left is removed."""
    file = None if file_id is None else store.files.get(file_id)
    if file is None:
        target.unlink(missing_ok=True)
        return
    making = target.with_name(target.name + ".part")
    with making.open("wb") as opened:
        for piece in store.files.content(file):
            opened.write(piece)
    making.replace(target)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as opened:
        while piece := opened.read(CHUNK_BYTES):
            yield piece


def _endpoint(path: Path) -> str:
    with path.open("rb") as opened:
        for line in opened:
            if line.strip():
                try:
                    return msgspec.json.decode(line, type=Request).url
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise BadInput(f"line 1 is not a batch request: {error}") from None
    raise BadInput("the file has no requests", value=str(path))


def _told(errors: list[LineError]) -> str:
    named = [f"line {error.line}: {error.message}" for error in errors[:3]]
    more = f" (and {len(errors) - 3} more)" if len(errors) > 3 else ""
    return "; ".join(named) + more
