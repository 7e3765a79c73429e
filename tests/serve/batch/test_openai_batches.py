"""The stock `openai` client drives files and batches over a socket."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import uvicorn

from ridgeline.serve.server import ServerOptions, listen, url_of
from tests.serve.batch.conftest import with_batches
from tests.serve.batch.helpers import CHAT, jsonl, request
from tests.serve.fake_engine import ANSWER, FakeEngine

pytestmark = pytest.mark.slow


@pytest.fixture
def client(engine: FakeEngine, tmp_path: Path) -> Iterator[openai.OpenAI]:
    listener = listen(ServerOptions(port=0))
    app = with_batches(engine, tmp_path / "batches.sqlite")
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    with openai.OpenAI(base_url=f"{url_of(listener)}/v1", api_key="none", max_retries=0) as opened:
        yield opened
    server.should_exit = True
    thread.join(timeout=10)
    listener.close()
    assert not thread.is_alive()


def test_openai_client_runs_a_batch(client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    names = [f"line-{i}" for i in range(25)]
    path.write_bytes(jsonl(*map(request, names)))
    with path.open("rb") as opened:
        file = client.files.create(file=opened, purpose="batch")
    assert file.filename == "in.jsonl" and file.bytes == path.stat().st_size
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"job": "night"}
    )
    end_s = time.monotonic() + 30
    while batch.status not in ("completed", "failed") and time.monotonic() < end_s:
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (25, 25)
    assert batch.metadata == {"job": "night"} and batch.output_file_id is not None
    text = client.files.content(batch.output_file_id).text
    found = [json.loads(line) for line in text.splitlines()]
    assert sorted(line["custom_id"] for line in found) == sorted(names)
    answers = {line["response"]["body"]["choices"][0]["message"]["content"] for line in found}
    assert answers == {ANSWER}
    assert [each.id for each in client.batches.list()] == [batch.id]
    assert {each.id for each in client.files.list()} == {file.id, batch.output_file_id}
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
