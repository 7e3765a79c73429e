"""The gateway over scripted backends: faults before, during and after a response."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ridgeline.errors import BadInput
from ridgeline.fleet.call import digest_of
from ridgeline.fleet.upstream import BackendAddress, UpstreamPool
from tests.fleet.scripted import HEAD, ScriptedBackend, answering, chunk, gateway_over

BODY = {"model": "m", "prompt": "x", "stream": True}
TOKENS = range(10, 16)


def event(token: int) -> bytes:
    return b'data: {"t":%d}\n\n' % token


WHOLE = b"".join(map(event, TOKENS)) + b"data: [DONE]\n\n"


def ridgeline(
    *, dies_after: int | None = None, migrates_after: int | None = None
) -> ScriptedBackend:
    """A backend that continues after the tokens of the resume point."""

    async def answer(
        backend: ScriptedBackend, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        point = body.get("ridgeline_resume", {})
        identity = b'x-ridgeline-resume: {"id":"c-1","created":1,"seed":1}\r\n\r\n'
        writer.write(HEAD + identity)
        sent = sum(map(len, point.get("tokens", ())))
        for number, token in enumerate(TOKENS[sent:]):
            if number == dies_after:
                await writer.drain()
                raise ConnectionError
            if number == migrates_after:
                writer.write(chunk(b": migrate\n\n") + b"0\r\n\r\n")
                backend.is_ready = False
                return
            writer.write(chunk(event(token) + b": 0:%d\n\n" % token))
            await asyncio.sleep(0.002)
        writer.write(chunk(b"data: [DONE]\n\n: end\n\n"))
        if dies_after == len(TOKENS):
            await writer.drain()
            raise ConnectionError
        writer.write(b"0\r\n\r\n")

    return ScriptedBackend(answer)


def other_server(*, dies_after: int | None = None) -> ScriptedBackend:
    async def answer(
        backend: ScriptedBackend, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        writer.write(HEAD + b"\r\n")
        for number, token in enumerate(TOKENS):
            if number == dies_after:
                writer.write(chunk(event(token)[:7]))
                await writer.drain()
                raise ConnectionError
            writer.write(chunk(event(token)))
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    return ScriptedBackend(answer)


def refusing(status: int, body: bytes = b"{}") -> ScriptedBackend:
    async def answer(
        backend: ScriptedBackend, _: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        length = b"content-length: %d\r\n\r\n" % len(body)
        writer.write(b"HTTP/1.1 %d No\r\n" % status + length + body)

    return ScriptedBackend(answer)


async def post(http: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await http.post("/v1/completions", json=BODY, headers=headers)


async def counter(http: httpx.AsyncClient, name: str) -> float:
    page = (await http.get("/metrics")).text
    line = next(x for x in page.splitlines() if x.startswith(f"ridgeline_fleet_{name}_total "))
    return float(line.rsplit(" ", 1)[1])


@pytest.mark.parametrize("dies_after", [0, 1, 3, 5])
async def test_stream_continues_on_another_backend(dies_after: int) -> None:
    dying, other = ridgeline(dies_after=dies_after), ridgeline()
    async with gateway_over(dying, other) as http:
        reply = await post(http)
        assert reply.content == WHOLE
        assert "x-ridgeline-resume" not in reply.headers
        assert await counter(http, "lost") == 0
    if dies_after:
        point = other.bodies[0]["ridgeline_resume"]
        assert point["tokens"] == [list(TOKENS[:dies_after])] and point["id"] == "c-1"


@pytest.mark.parametrize("dies_after", [1, 3, 5])
async def test_write_blocked_by_a_slow_client_ends_before_another_backend_continues(
    dies_after: int,
) -> None:
    received = b""
    requests = [{"type": "http.request", "body": msgspec.json.encode(BODY)}]

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        nonlocal received
        if message["type"] == "http.response.body":
            await asyncio.sleep(0.02)  # as uvicorn: waits first, and then writes
            received += message["body"]

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
    }
    async with gateway_over(ridgeline(dies_after=dies_after), ridgeline()) as http:
        await http._transport.app(scope, receive, send)
        assert received == WHOLE
        assert await counter(http, "lost") == 0


async def test_stopping_backend_is_left_without_a_word_to_the_client() -> None:
    async with gateway_over(ridgeline(migrates_after=2), ridgeline()) as http:
        assert (await post(http)).content == WHOLE
        assert await counter(http, "migrated") == 1


async def test_other_servers_stream_ends_in_an_error_event() -> None:
    async with gateway_over(other_server(dies_after=2)) as http:
        reply = await post(http)
        assert reply.content.startswith(event(10) + event(11) + b'data: {"error"')
        assert reply.content.endswith(b"data: [DONE]\n\n")
        assert await counter(http, "lost") == 1
    async with gateway_over(other_server()) as http:
        assert (await post(http)).content == WHOLE


@pytest.mark.parametrize(
    ("path", "start"),
    [("/v1/messages", b"event: error\n"), ("/v1/responses", b"event: error\n")],
)
async def test_error_event_is_that_of_the_api(path: str, start: bytes) -> None:
    async with gateway_over(other_server(dies_after=1)) as http:
        reply = await http.post(path, json=BODY)
        assert reply.content.startswith(event(10) + start)


async def test_request_whose_connections_always_break_fails_and_is_not_blamed() -> None:
    backends = [ridgeline(dies_after=0) for _ in range(4)]  # connections break, processes do not
    async with gateway_over(*backends) as http:
        for number in (1, 2):
            reply = await post(http)
            assert reply.status_code == 502 and "broke off" in reply.json()["error"]["message"]
            assert sum(len(backend.bodies) for backend in backends) == 16 * number
        assert await counter(http, "denied") == 0


async def test_error_before_the_first_byte_is_tried_elsewhere() -> None:
    failing, working = refusing(500), ridgeline()
    async with gateway_over(failing, working) as http:
        for _ in range(3):
            assert (await post(http)).content == WHOLE
        assert await counter(http, "retried") >= 1


async def test_clients_own_errors_are_passed_on() -> None:
    async with gateway_over(refusing(400, b'{"error":{"message":"no"}}')) as http:
        reply = await post(http)
        assert reply.status_code == 400 and reply.json() == {"error": {"message": "no"}}


async def test_request_waits_for_a_backend_and_then_for_no_longer() -> None:
    backend = ridgeline()
    async with gateway_over(backend, park_timeout_s=1.0) as http:
        backend.is_ready = False
        await asyncio.sleep(1.3)
        waiting = asyncio.create_task(post(http))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        backend.is_ready = True
        assert (await waiting).content == WHOLE
        backend.is_ready = False
        await asyncio.sleep(1.3)
        reply = await post(http)
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1


async def test_metrics_tell_the_load_and_the_replicas_wanted() -> None:
    async with gateway_over(ridgeline(), target_in_flight=1) as http:
        calls = [asyncio.create_task(post(http)) for _ in range(3)]
        await asyncio.sleep(0.01)
        page = (await http.get("/metrics")).text
        await asyncio.gather(*calls)
    assert "ridgeline_wanted_replicas 3.0" in page
    assert 'ridgeline_fleet_backends{state="ready"} 1.0' in page
    for name in ("resumed", "migrated", "lost", "retried", "denied", "reconnected"):
        assert f"ridgeline_fleet_{name}_total 0.0" in page


async def test_batch_requests_of_the_backends_add_replicas() -> None:
    backends = [ridgeline() for _ in range(3)]
    for backend, demand in zip(backends, (b"a=1.5", b"a=1.25", b"b=2"), strict=True):
        backend.probe_headers = b"x-ridgeline-batch: %b\r\n" % demand
    async with gateway_over(*backends) as http:
        page = (await http.get("/metrics")).text
        view = (await http.get("/ridgeline/fleet")).json()
    assert "ridgeline_wanted_replicas 4.0" in page
    assert [b["batch_servers"] for b in view["backends"]] == [1.5, 1.25, 2.0]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_only_streams_tell_how_fast_prompts_are_computed(is_stream: bool) -> None:
    async with gateway_over(ridgeline() if is_stream else answering(b"{}")) as http:
        body = {"model": "m", "prompt": "a b c", "stream": is_stream}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        backend = (await http.get("/ridgeline/fleet")).json()["backends"][0]
    assert (backend["prefill_tok_s"] > 0) == is_stream
    assert (backend["in_flight"], backend["queued_tokens"]) == (0, 0)


async def test_models_are_routed_to_the_backends_that_serve_them() -> None:
    first, second = ridgeline(), ridgeline()
    second.model = "other"
    async with gateway_over(first, second) as http:
        for _ in range(4):
            await http.post("/v1/completions", json={**BODY, "model": "other"})
        assert len(second.bodies) == 4 and not first.bodies
        reply = await http.post("/v1/completions", json={**BODY, "model": "none"})
        assert reply.status_code == 404 and "m, other" in reply.json()["error"]["message"]
        models = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["m", "other"]
        assert (await http.get("/v1/models/other")).json() == models[1]
        reply = await http.get("/v1/models/none")
        assert reply.status_code == 404 and "m, other" in reply.json()["error"]["message"]


async def test_client_continues_after_its_last_event() -> None:
    async with gateway_over(ridgeline()) as http:
        reply = await post(http, **{"x-ridgeline-event-ids": "1"})
        events = reply.content.split(b"\n\n")
        last = events[1].partition(b"\nid: ")[2].decode()
        assert last.startswith("c-1/")
        rest = await post(http, **{"last-event-id": last})
        assert rest.status_code == 200
        left = reply.content[reply.content.index(b'data: {"t":12}') :]
        assert rest.content == left
        assert await counter(http, "reconnected") == 1 and await counter(http, "resumed") == 0
        assert (await post(http, **{"last-event-id": "c-1/2"})).status_code == 400
        for changes in ({"n": 2}, {"stream": False}):
            other = await http.post(
                "/v1/completions", json={**BODY, **changes}, headers={"last-event-id": last}
            )
            assert other.status_code == 400
    first, second = ridgeline(dies_after=1), ridgeline()
    async with gateway_over(first, second) as another:  # which has never seen the stream
        assert (await post(another, **{"last-event-id": last})).content == left
        points = [b.bodies[0]["ridgeline_resume"]["tokens"] for b in (first, second)]
        assert points == [[], [[10]]]


async def test_stream_that_breaks_behind_its_end_is_complete() -> None:
    dying, other = ridgeline(dies_after=len(TOKENS)), ridgeline()
    async with gateway_over(dying, other) as http:
        reply = await post(http)
        assert reply.content == WHOLE and not other.bodies
        assert await counter(http, "lost") == 0


def id_of_event(checksum: str) -> str:
    digest = digest_of("/v1/completions", msgspec.json.encode(BODY)).hex()[:12]
    return f"c-1/1.1.{digest}.2-{checksum}"


async def reconnect(http: httpx.AsyncClient, checksum: str = "000000") -> httpx.Response:
    headers = {"last-event-id": id_of_event(checksum)}
    return await http.post("/v1/completions", content=msgspec.json.encode(BODY), headers=headers)


@pytest.mark.parametrize(("status", "times"), [(401, 1), (429, 1), (503, 4)])
async def test_refusal_of_a_continuation_is_passed_on(status: int, times: int) -> None:
    backend = refusing(status, b'{"error":{"message":"no"}}')
    async with gateway_over(backend) as http:
        reply = await reconnect(http)
        assert reply.status_code == status and reply.json() == {"error": {"message": "no"}}
        assert len(backend.bodies) == times
        assert await counter(http, "lost") == 0


async def test_another_answer_is_not_added_to_what_the_client_has() -> None:
    async with gateway_over(ridgeline()) as http:
        events = (await post(http, **{"x-ridgeline-event-ids": "1"})).content.split(b"\n\n")
        last, checksum = events[1].partition(b"\nid: ")[2].decode().rsplit("-", 1)
        for _ in range(2):
            reply = await post(http, **{"last-event-id": f"{last}-0bad00"})
            assert reply.status_code == 409 and "Last-Event-ID" in reply.json()["error"]["message"]
            rest = await post(http, **{"last-event-id": f"{last}-{checksum}"})
            assert rest.content.startswith(b'data: {"t":12}') and rest.status_code == 200
    async with gateway_over(ridgeline()) as another:
        assert (await reconnect(another)).status_code == 409
        assert (await reconnect(another, checksum)).content == rest.content


async def test_continuation_goes_to_no_server_that_cannot_continue() -> None:
    other = other_server()
    other.is_ridgeline = False
    async with gateway_over(other, park_timeout_s=0.2) as http:
        await asyncio.sleep(0.1)
        reply = await reconnect(http)
        assert reply.status_code == 503 and not other.bodies


async def test_silent_backend_is_left() -> None:
    async def hang(
        backend: ScriptedBackend, _: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        identity = b'x-ridgeline-resume: {"id":"c-1","created":1,"seed":1}\r\n\r\n'
        writer.write(HEAD + identity + chunk(event(10) + b": 0:10\n\n"))
        backend.is_silent = True
        await asyncio.sleep(30)

    async with gateway_over(ScriptedBackend(hang), ridgeline(), silence_s=0.5) as http:
        async with asyncio.timeout(15):
            assert (await post(http)).content == WHOLE


async def test_kernel_notices_when_a_connection_is_forgotten() -> None:
    backend = ridgeline()
    server = await asyncio.start_server(backend.accept, "127.0.0.1", 0)
    address = BackendAddress("127.0.0.1", server.sockets[0].getsockname()[1])
    connection = await UpstreamPool(address, lambda: 0.0).exchange(b"POST", b"/", [], b"{}")
    assert connection._transport is not None
    own = connection._transport.get_extra_info("socket")
    assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    num_seconds = [own.getsockopt(socket.IPPROTO_TCP, option)
                   for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)]  # fmt: skip
    assert num_seconds == [15, 5]
    connection.close()
    server.close()


async def test_paths_of_the_gateway_and_bad_bodies() -> None:
    async with gateway_over(ridgeline()) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/batches")).status_code == 404
        assert (await http.post("/v1/files", content=b"x")).status_code == 404
        large = await http.post("/v1/completions", content=b"x" * (5 << 20))
        assert large.status_code == 413
        assert (await http.get("/ready", headers={"host": "evil.example"})).status_code == 403


class Spans:
    """Telemetry of a gateway that keeps its spans."""

    traceparent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        self.ended: list[Any] = []

    def end_request(self, record: Any) -> None:
        raise AssertionError("a gateway routes")

    def begin_route(self, path: str, traceparent: str, scheme: str) -> Spans:
        self.begun.append((traceparent, scheme))
        return self

    def end(self, record: Any) -> None:
        self.ended.append(record)

    def close(self) -> None:
        pass


async def test_trace_context_reaches_the_backend_through_the_gateways_span() -> None:
    heads: list[bytes] = []
    dying, other = ridgeline(dies_after=2), ridgeline()
    async with gateway_over(dying, other) as http:
        app = http._transport.app
        while not hasattr(app, "metrics"):
            app = getattr(app, "app", None) or app._app
        spans = app._telemetry = Spans()
        for backend in app.backends.all:
            exchange = backend.pool.exchange

            async def watch(method: bytes, path: bytes, headers: Any = (), body: bytes = b"",
                            patience: float = 1.0, exchange: Any = exchange) -> Any:  # fmt: skip
                heads.append(dict(headers)[b"traceparent"])
                return await exchange(method, path, headers, body, patience)

            backend.pool.exchange = watch
        parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
        http.base_url = http.base_url.copy_with(scheme="https")
        await post(http, traceparent=parent)
    assert spans.begun == [(parent, "https")]
    assert heads == [Spans.traceparent.encode()] * len(heads)
    (record,) = spans.ended
    assert (record.path, record.status) == ("/v1/completions", 200)
    assert record.num_attempts == len(heads) and record.is_resumed == (len(heads) > 1)


async def test_backends_follow_their_file(tmp_path: Path) -> None:
    first, second = ridgeline(), ridgeline()
    path = tmp_path / "backends"
    path.write_text("# none yet\n")
    async with gateway_over(first, second, backend_file=path, listed=False) as http:
        assert (await http.get("/ready")).status_code == 503
        waiting = asyncio.create_task(post(http))
        await asyncio.sleep(0.05)
        path.write_text(f"{first.url}  # the old one\n")
        assert (await waiting).content == WHOLE
        part = path.with_suffix(".part")
        part.write_text(f"{second.url}\n")
        part.replace(path)
        for _ in range(100):
            await post(http)
            if second.bodies:
                break
            await asyncio.sleep(0.02)
        num_first = len(first.bodies)
        for _ in range(4):
            assert (await post(http)).content == WHOLE
        assert len(first.bodies) == num_first
        assert first.url not in (await http.get("/metrics")).text
        path.write_text("nonsense\n")  # changes nothing
        await asyncio.sleep(0.4)
        assert (await post(http)).content == WHOLE
        path.write_text(f"{first.url}\n")
        for _ in range(100):
            await post(http)
            if len(first.bodies) > num_first:
                break
            await asyncio.sleep(0.02)
        assert len(first.bodies) > num_first


async def test_missing_backend_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="backend-file"):
        async with gateway_over(ridgeline(), backend_file=tmp_path / "none"):
            pass


@pytest.mark.parametrize("is_stream", [False, True])
async def test_requests_one_after_another_share_a_connection(is_stream: bool) -> None:
    async def answer(
        backend: ScriptedBackend, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        if is_stream:
            writer.write(HEAD + b"\r\n" + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n"
        writer.write(head + b"{}")

    backend = ScriptedBackend(answer)
    async with gateway_over(backend) as http:
        for _ in range(5):
            body = {"model": "m", "prompt": "x", "stream": is_stream}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert backend.num_used_connections == 1
