"""The server process: addresses, options, and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.errors import BadInput, EngineUnavailable
from ridgeline.serve.app import add_model, create_app
from ridgeline.serve.drain import DrainState
from ridgeline.serve.server import GracefulServer, listen, run, url_of, uvicorn_config
from tests.serve.conftest import running
from tests.serve.fake_engine import ANSWER, FakeEngine

SERVER = """
import sys
from ridgeline.serve.app import create_app
from ridgeline.config.server import ServerOptions
from ridgeline.serve.server import listen, run, url_of
from tests.serve.fake_engine import FakeEngine
options = ServerOptions(port=0, shutdown_timeout_s=int(sys.argv[1]))
listener = listen(options)
app = create_app(FakeEngine(), options)
run(app, listener, options, on_ready=lambda: print(url_of(listener), flush=True))
print("ended", flush=True)
"""


def start(shutdown_timeout_s: int) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(shutdown_timeout_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},  # noqa: PTH109
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def stop(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str, float]:
    began = time.monotonic()
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    return process.returncode, out, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_exits_normally(number: signal.Signals) -> None:
    process, url = start(shutdown_timeout_s=20)
    body = {"prompt": "!slow", "max_tokens": 30, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
        lines = (line for line in reply.iter_lines() if line)
        texts = [next(lines)]  # it is running
        process.send_signal(number)
        texts += lines
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "ended\n")
    chunks = [json.loads(text.removeprefix("data: ")) for text in texts[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER[:30]
    assert texts[-1] == "data: [DONE]"


@pytest.mark.slow
def test_connections_queue_in_the_system_while_the_loop_is_busy() -> None:
    """Few are accepted per iteration of the loop; many more may wait in the system."""
    process, url = start(shutdown_timeout_s=1)
    process.send_signal(signal.SIGSTOP)
    host, port = urlsplit(url).netloc.split(":")
    with contextlib.ExitStack() as held:
        waiting = [
            held.enter_context(socket.create_connection((host, int(port)), timeout=5))
            for _ in range(300)
        ]
        process.send_signal(signal.SIGCONT)
        for connection in waiting:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert all(connection.recv(9) == b"HTTP/1.1 " for connection in waiting)
    assert stop(process, signal.SIGTERM)[0] == 0


@pytest.mark.slow
def test_requests_are_cut_off_after_the_shutdown_timeout() -> None:
    process, url = start(shutdown_timeout_s=1)

    def wait() -> None:
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{url}/v1/completions", json={"prompt": "!stuck"}).raise_for_status()

    client = threading.Thread(target=wait)
    client.start()
    time.sleep(0.2)
    code, _, elapsed_s = stop(process, signal.SIGTERM)
    client.join()
    assert code == 0 and elapsed_s < 10


ENDINGS = {
    "/v1/completions": '{"error":{"message":"the server is stopping',
    "/v1/chat/completions": '{"error":{"message":"the server is stopping',
    "/v1/messages": '{"type":"error","error":{"type":"overloaded_error",',
    "/v1/responses": '{"type":"error","code":"503","message":"the server is stopping',
}


def body_of(path: str, command: str) -> dict[str, Any]:
    """A request of each endpoint with a prompt that makes the fake engine misbehave."""
    messages = {"messages": [{"role": "user", "content": command}]}
    return {
        "/v1/completions": {"prompt": command, "max_tokens": 30},
        "/v1/chat/completions": messages,
        "/v1/messages": {**messages, "model": "fake", "max_tokens": 30},
        "/v1/responses": {"input": command},
    }[path]


def send(url: str, body: dict[str, Any]) -> socket.socket:
    """Send a request; its response is not read."""
    parts, data = urlsplit(url), json.dumps(body).encode()
    connection = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20)
    head = f"POST {parts.path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.slow
@pytest.mark.parametrize("num_signals", [1, 2])
def test_cut_off_requests_end_with_an_error(num_signals: int) -> None:
    """A stream that has started ends with an error in the shape of its API, anything else is a 503
    in JSON. There is never a second response head, and nothing is logged."""
    process, url = start(shutdown_timeout_s=1 if num_signals == 1 else 60)
    with process, contextlib.ExitStack() as held:
        held.callback(process.kill)
        begun, silent, whole = (
            {
                path: held.enter_context(send(f"{url}{path}", {**body_of(path, command), **more}))
                for path in ENDINGS
            }
            for command, more in (("!hang", {"stream": True}), ("!stuck", {"stream": True}),
                                ("!hang", {}))
        )  # fmt: skip
        first = {path: connection.recv(1 << 16) for path, connection in begun.items()}
        time.sleep(0.5)
        for _ in range(num_signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        for path, connection in begun.items():
            data = (first[path] + rest_of(connection)).decode()
            assert data.startswith("HTTP/1.1 200 ") and data.count("HTTP/1.1") == 1
            assert data.endswith("\r\n0\r\n\r\n"), data
            assert f"data: {ENDINGS[path]}" in data, data
        for answers in (silent, whole):
            for connection in answers.values():
                head, _, data = rest_of(connection).decode().partition("\r\n\r\n")
                assert head.startswith("HTTP/1.1 503 ") and "application/json" in head, head
                assert "the server is stopping" in data and json.loads(data)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "ended\n", "")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_cancelled_requests_send_one_response_head(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever did not end when it was data to: a connection that breaks off, or a 503."""
    app = create_app(FakeEngine())
    app.state.service.cut_off = lambda: None  # it ends no stream
    body = {"prompt": "!hang", "stream": True} if path == "/v1/completions" else {"input": "!stuck"}
    with running(app) as url:
        connection = send(f"{url}{path}", body)
        time.sleep(0.3)
    with connection:
        data = rest_of(connection)
    assert data.count(b"HTTP/1.1") == 1 and b"text/plain" not in data
    assert data.startswith(b"HTTP/1.1 200 " if path == "/v1/completions" else b"HTTP/1.1 503 ")
    assert not [record for record in caplog.records if record.exc_info]


def rest_of(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def test_port_in_use_names_the_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(BadInput, match="--port") as caught:
            listen(ServerOptions(port=taken.getsockname()[1]))
        assert str(taken.getsockname()[1]) in str(caught.value)


def test_unresolvable_host_names_the_flag() -> None:
    with pytest.raises(BadInput, match="--host"):
        listen(ServerOptions(host="no.such.host.invalid"))


class _Service:
    """What is drained."""

    def __init__(self) -> None:
        self.options, self.drain = ServerOptions(), DrainState()

    def end_streams(self) -> None: ...

    def lost(self) -> str | None:
        return None


@pytest.mark.parametrize("closes", [False, True])
def test_port_of_a_draining_server_is_free_if_it_is_to_be(closes: bool) -> None:
    may_end, service = threading.Event(), _Service()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for state in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{state}.complete"})
            return
        with service.drain:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
            while not may_end.is_set():
                await asyncio.sleep(0.01)
            await send({"type": "http.response.body", "body": b"ended"})

    listener = listen(ServerOptions(port=0))
    url, port = url_of(listener), listener.getsockname()[1]
    server = GracefulServer(uvicorn_config(app, service.options), service)
    server.closes_on_stop = closes
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with httpx.stream("GET", url) as reply:
            parts = reply.iter_raw()
            assert next(parts) == b"begun "
            service.drain.start(60)
            if closes:
                while True:
                    with contextlib.suppress(BadInput), listen(ServerOptions(port=port)):
                        break
            else:
                with pytest.raises(BadInput):
                    listen(ServerOptions(port=port))
            may_end.set()
            assert b"".join(parts) == b"ended"
    finally:
        may_end.set()
        service.drain.start(0)
        thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("closes", "after_s", "stops"), [(True, 0.01, False), (True, 1.5, True), (False, 0.01, True)]
)
def test_second_signal_stops_unless_it_repeats_the_first(
    closes: bool, after_s: float, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = iter((5.0, 5.0 + after_s))
    monkeypatch.setattr("ridgeline.serve.server.time.monotonic", lambda: next(now_s))
    service = _Service()
    service.drain = DrainState(lambda: 0.0)
    server = GracefulServer(uvicorn_config(lambda: None, service.options), service)  # type: ignore[arg-type]
    server.closes_on_stop = closes
    server.handle_exit(signal.SIGTERM, None)
    assert service.drain.is_draining and not server.should_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit is stops


def test_connections_have_nodelay() -> None:
    with (
        listen(ServerOptions(port=0)) as listener,
        socket.create_connection(listener.getsockname()[:2]),
        listener.accept()[0] as served,
    ):
        assert served.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_port_zero_takes_a_free_port() -> None:
    with listen(ServerOptions(port=0)) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")


@pytest.mark.parametrize("dead", [0, 1])
def test_server_ends_with_the_first_engine_that_does(dead: int) -> None:
    """No engine can be replaced in its process: whatever started the server starts another."""
    engines, options = [FakeEngine(), FakeEngine()], ServerOptions(port=0)
    engines[1].info = msgspec.structs.replace(engines[1].info, model="other")
    app = create_app(engines[0], options)
    add_model(app, engines[1], options)

    def die() -> None:
        assert app.state.service.lost() is None
        engines[dead].cause_of_death = "rank 1 ended by signal 9"

    with (
        listen(options) as listener,
        pytest.raises(EngineUnavailable, match="cannot go on: rank 1 ended by signal 9; fix: star"),
    ):
        run(app, listener, options, on_ready=die)
