"""`serve`: a server in this process, its end, and its errors."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

import ridgeline
from ridgeline.errors import BadInput, BadModel

pytestmark = pytest.mark.slow

SMALL = 32 << 20


def test_server_answers_until_it_is_closed(tmp_path: Path) -> None:
    with ridgeline.serve("demo", port=0, kv_cache_memory_bytes=SMALL) as server:
        body = {"prompt": "import os", "max_tokens": 3, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert server.is_running and server.url in repr(server)
        assert server.to_dict()["url"] == server.url
        assert server.url in server.save(tmp_path / "server.json").read_text()
        assert server._repr_html_().startswith("<iframe srcdoc=")
    assert not server.is_running
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    server.close()


def test_closing_lets_a_running_request_finish() -> None:
    server = ridgeline.serve("demo", port=0, kv_cache_memory_bytes=SMALL)
    body = {"prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        server._stop()
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    server.wait()
    assert not server.is_running


def test_errors_are_raised_by_the_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match="cannot listen on this address"):
            ridgeline.serve("demo", port=port)
    with pytest.raises(BadModel):
        ridgeline.serve("no/such/model", port=0)
