"""Stores with batches, and results without an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from ridgeline.serve.batch.records import BatchJob, BatchResult, Lease, NewBatch
from ridgeline.serve.batch.store import BatchStore
from ridgeline.serve.batch.validate import validate_file

CHAT = "/v1/chat/completions"


class Clock:
    """Unix seconds that only change when a test changes them."""

    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def request(name: str, **rest: Any) -> dict[str, Any]:
    """One line of an input file."""
    messages = [{"role": "user", "content": name}]
    body = {"model": "fake", "messages": messages, "max_tokens": 40}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body, **rest}


def jsonl(*requests: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in requests)


def upload(store: BatchStore, data: bytes) -> str:
    """The id of a new file."""
    upload_ = store.files.begin()
    upload_.write(data)
    return upload_.finish("in.jsonl", "batch", None).id


def created(store: BatchStore, *names: str, window_s: int = 86_400, **rest: Any) -> BatchJob:
    """A batch that is not validated yet."""
    file_id = upload(store, jsonl(*(request(name) for name in names)))
    new = NewBatch(
        input_file_id=file_id, endpoint=CHAT, completion_window="24h", window_s=window_s, **rest
    )
    return store.create(new)


def accepted(store: BatchStore, *names: str, **rest: Any) -> BatchJob:
    """A batch whose requests are pending."""
    batch = created(store, *names, **rest)
    file = store.files.get(batch.input_file_id)
    assert file is not None
    assert store.accept(batch.id, validate_file(store.files.content(file), CHAT).lines, "fake")
    return now(store, batch)


def now(store: BatchStore, batch: BatchJob) -> BatchJob:
    """The current record of the batch."""
    current = store.get(batch.id)
    assert current is not None
    return current


def outcome(lease: Lease, *, succeeded: bool = True) -> BatchResult:
    result = {"custom_id": lease.custom_id, "response": {"status_code": 200}, "error": None}
    return BatchResult(
        lease=lease,
        succeeded=succeeded,
        line=msgspec.json.encode(result),
        prompt_tokens=3,
        completion_tokens=2,
    )


def results(store: BatchStore, batch: BatchJob) -> list[tuple[str, dict[str, Any]]]:
    """("output" or "error", line) of every line of both files."""
    return [
        *_read(store, "output", batch.output_file_id),
        *_read(store, "error", batch.error_file_id),
    ]


def _read(
    store: BatchStore, kind: str, file_id: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    file = None if file_id is None else store.files.get(file_id)
    if file is None:
        return
    text = b"".join(store.files.content(file))
    assert len(text) == file.num_bytes
    for line in text.splitlines():
        yield kind, json.loads(line)
