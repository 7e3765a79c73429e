"""Traces and metrics of requests: what is recorded, and what a collector receives."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from ridgeline.config.server import ServerOptions
from ridgeline.errors import BadInput, EngineFull
from ridgeline.records import Sampling
from ridgeline.serve.app import create_app
from ridgeline.serve.telemetry import open_telemetry
from ridgeline.serve.telemetry.base import (
    OPERATIONS,
    NoRouteSpan,
    NoTelemetry,
    RequestRecord,
    RoutedRecord,
    RouteSpan,
)
from ridgeline.serve.telemetry.emf import EmfTelemetry
from tests.serve.fake_engine import FakeEngine

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
RECORD = RequestRecord(
    operation="chat",
    model="demo",
    request_id="chatcmpl-1",
    began_ns=1_000_000_000_000_000_000,
    started_s=0.1,
    first_s=0.25,
    ended_s=1.25,
    input_tokens=7,
    cached_tokens=4,
    output_tokens=11,
    finish_reasons=("stop",),
    sampling=Sampling(temperature=0.5, n=1, seed=3, max_tokens=11),
    is_streamed=True,
    traceparent=PARENT,
)


class Recorder:
    """Telemetry that keeps the records."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def end_request(self, record: RequestRecord) -> None:
        self.records.append(record)

    def begin_route(self, path: str, traceparent: str, scheme: str) -> RouteSpan:
        return NoRouteSpan()

    def close(self) -> None:
        pass


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def client(engine: FakeEngine, recorder: Recorder) -> httpx.AsyncClient:
    app = create_app(engine, ServerOptions(served_model_name="fake"))
    app.state.service.telemetry = recorder
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


@pytest.mark.parametrize("stream", [False, True])
async def test_finished_request_is_recorded_once(
    client: httpx.AsyncClient, recorder: Recorder, stream: bool
) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stream": stream}
    reply = await client.post(
        "/v1/chat/completions", json=body, headers={"traceparent": PARENT, "x-request-id": "r"}
    )
    assert reply.status_code == 200
    (record,) = recorder.records
    assert (record.operation, record.model, record.error) == ("chat", "fake", "")
    assert record.traceparent == PARENT and record.sampling is not None
    assert record.sampling.max_tokens == 5
    assert record.is_streamed is stream
    assert record.output_tokens > 0 and record.finish_reasons
    assert record.first_s is not None and record.started_s is not None
    assert 0 <= record.started_s <= record.first_s <= record.ended_s
    assert record.input_tokens > 0


@pytest.mark.parametrize(
    ("body", "operation"),
    [
        ({"messages": [{"role": "user", "content": "hello"}]}, "chat"),
        ({"prompt": "hello"}, "text_completion"),
        ({"input": "hello"}, "embeddings"),
    ],
)
@pytest.mark.parametrize("path", ["/invocations", "own"])
async def test_operation_is_what_was_asked_for(
    client: httpx.AsyncClient, recorder: Recorder, body: dict[str, Any], operation: str, path: str
) -> None:
    own = next(path for path, name in OPERATIONS.items() if name == operation)
    reply = await client.post(own if path == "own" else path, json=body,
                              headers={"traceparent": PARENT})  # fmt: skip
    assert reply.status_code == 200, reply.text
    (record,) = recorder.records
    assert (record.operation, record.error, record.traceparent) == (operation, "", PARENT)
    assert record.input_tokens == reply.json()["usage"]["prompt_tokens"] > 0
    assert (record.sampling is None) == (operation == "embeddings")


async def test_request_that_the_engine_refuses_is_an_error(
    client: httpx.AsyncClient, recorder: Recorder, engine: FakeEngine, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    async def refuse(*_: Any, **__: Any) -> Any:
        raise EngineFull("full", reason="queue", retry_after_s=1.0)

    monkeypatch.setattr(engine, "listen", refuse)
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 503
    (record,) = recorder.records
    assert record.error == "EngineFull" and record.first_s is None
    path = tmp_path / "emf.log"
    telemetry = EmfTelemetry(str(path), "ridgeline")
    for error in ("EngineFull", "cancelled", ""):
        telemetry.end_request(replace(record, error=error))
    telemetry.close()
    line = json.loads(path.read_text())
    assert (line["Requests"], line["Errors"]) == (3, 1)


async def test_refused_request_is_no_record(client: httpx.AsyncClient, recorder: Recorder) -> None:
    assert (await client.post("/v1/completions", json={"prompt": "x", "n": 0})).status_code == 400
    assert recorder.records == []


async def test_cancelled_embedding_is_no_success(
    client: httpx.AsyncClient, recorder: Recorder, engine: FakeEngine
) -> None:
    request = asyncio.create_task(client.post("/v1/embeddings", json={"input": "!stuck"}))
    async with asyncio.timeout(10):
        while not engine.embedded:
            await asyncio.sleep(0.01)
    request.cancel()  # as by a server that stops
    assert (await request).status_code == 503
    (record,) = recorder.records
    assert (record.operation, record.error) == ("embeddings", "cancelled")


class Collector:
    """Receives OTLP over HTTP on a loopback port."""

    def __init__(self) -> None:
        self.bodies: dict[str, list[bytes]] = {"/v1/traces": [], "/v1/metrics": []}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    data = gzip.decompress(data)
                collector.bodies[self.path].append(data)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk")
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: pair.value for pair in pairs}


def test_collector_receives_a_span_with_genai_names(collector: Collector) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    telemetry = open_telemetry(collector.url, None, service="ridgeline")
    telemetry.end_request(RECORD)
    telemetry.close()
    request = ExportTraceServiceRequest.FromString(collector.bodies["/v1/traces"][0])
    (resource,) = request.resource_spans
    assert attributes(resource.resource.attributes)["service.name"].string_value == "ridgeline"
    (span,) = resource.scope_spans[0].spans
    assert span.name == "chat demo" and span.kind == span.SPAN_KIND_SERVER
    assert span.trace_id.hex() == PARENT.split("-")[1]
    assert span.parent_span_id.hex() == PARENT.split("-")[2]
    assert span.end_time_unix_nano - span.start_time_unix_nano == 1_250_000_000
    values = attributes(span.attributes)
    assert values["gen_ai.operation.name"].string_value == "chat"
    assert values["gen_ai.request.model"].string_value == "demo"
    assert values["gen_ai.usage.input_tokens"].int_value == 7
    assert values["gen_ai.usage.output_tokens"].int_value == 11
    assert values["gen_ai.usage.cache_read.input_tokens"].int_value == 4
    assert values["gen_ai.request.temperature"].double_value == 0.5
    assert values["gen_ai.request.seed"].int_value == 3
    assert values["gen_ai.request.stream"].bool_value
    assert not values.keys() & {"gen_ai.request.choice.count", "gen_ai.request.top_k"}
    events = {e.name: e.time_unix_nano - span.start_time_unix_nano for e in span.events}
    assert events == {"ridgeline.started": 100_000_000, "ridgeline.first_token": 250_000_000}


def test_collector_receives_the_server_metrics(collector: Collector) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    telemetry = open_telemetry(collector.url, None, service="ridgeline")
    telemetry.end_request(RECORD)
    telemetry.close()
    request = ExportMetricsServiceRequest.FromString(collector.bodies["/v1/metrics"][-1])
    metrics = {
        metric.name: metric
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    sums = {
        name: metric.histogram.data_points[0].sum
        for name, metric in metrics.items()
        if metric.HasField("histogram")
    }
    assert sums["gen_ai.server.request.duration"] == 1.25
    assert sums["gen_ai.server.time_to_first_token"] == 0.25
    assert sums["gen_ai.server.time_per_output_token"] == pytest.approx(0.1)
    usage = "gen_ai.client.inference.usage."
    points = {name: metrics[name].sum.data_points[0] for name in metrics if name.startswith(usage)}
    assert {name.removeprefix(usage): point.as_int for name, point in points.items()} == {
        "input_tokens": 7,
        "cache_read.input_tokens": 4,
        "output_tokens": 11,
    }
    for point in points.values():
        values = attributes(point.attributes)
        assert values["gen_ai.token.modality"].string_value == "text"
        assert values["gen_ai.request.model"].string_value == "demo"
    assert sums["gen_ai.client.inference.operation.input_tokens"] == 7
    assert sums["gen_ai.client.inference.operation.output_tokens"] == 11


def test_backends_span_is_the_child_of_the_gateways(collector: Collector) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    telemetry = open_telemetry(collector.url, None, service="ridgeline-route")
    span = telemetry.begin_route("/v1/completions", PARENT, "https")
    version, trace_id, span_id, _ = span.traceparent.split("-")
    assert (version, trace_id) == ("00", PARENT.split("-")[1]) and span_id != PARENT.split("-")[2]
    backend = "http://10.0.0.7:8000"
    span.end(RoutedRecord(path="/v1/completions", began_ns=0, ended_s=1.0, status=200,
                          backend=backend, num_attempts=2, is_resumed=True))  # fmt: skip
    telemetry.close()
    request = ExportTraceServiceRequest.FromString(collector.bodies["/v1/traces"][0])
    (exported,) = request.resource_spans[0].scope_spans[0].spans
    assert exported.span_id.hex() == span_id and exported.name == "POST /v1/completions"
    values = attributes(exported.attributes)
    assert values["http.request.method"].string_value == "POST"
    assert values["http.route"].string_value == values["url.path"].string_value
    assert values["url.scheme"].string_value == "https"
    assert values["http.response.status_code"].int_value == 200
    assert values["ridgeline.backend"].string_value == backend
    assert values["ridgeline.attempts"].int_value == 2 and values["ridgeline.resumed"].bool_value


@pytest.mark.slow  # the SDK tries for two seconds
def test_collector_that_is_away_ends_nothing() -> None:
    pytest.importorskip("opentelemetry.sdk")
    telemetry = open_telemetry("http://127.0.0.1:9", None, service="ridgeline")
    telemetry.end_request(RECORD)
    start_s = time.monotonic()
    telemetry.close()
    assert time.monotonic() - start_s < 10


def test_tokens_of_another_server_count_once(collector: Collector, tmp_path: Path) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    record = replace(RECORD, is_resumed=True, resumed_tokens=6)
    assert record.tpot_s == pytest.approx(1.0 / 4)
    path = tmp_path / "emf.log"
    telemetry = open_telemetry(collector.url, str(path), service="ridgeline")
    telemetry.end_request(record)
    telemetry.close()
    assert json.loads(path.read_text())["OutputTokens"] == 5
    request = ExportMetricsServiceRequest.FromString(collector.bodies["/v1/metrics"][-1])
    (metric,) = [
        metric
        for metric in request.resource_metrics[0].scope_metrics[0].metrics
        if metric.name.endswith("usage.output_tokens")
    ]
    assert metric.sum.data_points[0].as_int == 5


def test_stream_that_moves_is_one_request(collector: Collector, tmp_path: Path) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    path = tmp_path / "emf.log"
    telemetry = open_telemetry(collector.url, str(path), service="ridgeline")
    telemetry.end_request(replace(RECORD, output_tokens=6, finish_reasons=(), is_migrated=True))
    telemetry.end_request(replace(RECORD, is_resumed=True, resumed_tokens=6))
    telemetry.close()
    line = json.loads(path.read_text())
    assert {name: line[name] for name in ("Requests", "Errors", "InputTokens", "OutputTokens")} == {
        "Requests": 1, "Errors": 0, "InputTokens": 7, "OutputTokens": 11,
    }  # fmt: skip
    assert line["CachedTokens"] == 4
    assert (line["Duration"], line["TimeToFirstToken"]) == ([1250.0], [250.0])
    request = ExportMetricsServiceRequest.FromString(collector.bodies["/v1/metrics"][-1])
    counts, totals = dict[str, int](), dict[str, int]()
    for metric in request.resource_metrics[0].scope_metrics[0].metrics:
        name = metric.name.removeprefix("gen_ai.")
        if metric.HasField("histogram"):
            counts[name] = sum(point.count for point in metric.histogram.data_points)
        else:
            totals[name] = sum(point.as_int for point in metric.sum.data_points)
    each, used = "client.inference.operation.", "client.inference.usage."
    assert counts == {
        "server.request.duration": 1,
        "server.time_to_first_token": 1,
        "server.time_per_output_token": 2,
        f"{each}input_tokens": 1,
        f"{each}output_tokens": 1,
    }
    assert totals == {
        f"{used}input_tokens": 7,
        f"{used}cache_read.input_tokens": 4,
        f"{used}output_tokens": 11,
    }


def test_minute_becomes_one_line_per_model(tmp_path: Path) -> None:
    path = tmp_path / "emf.log"
    telemetry = EmfTelemetry(str(path), "ridgeline")
    for _ in range(250):
        telemetry.end_request(RECORD)
    telemetry.close()
    (line,) = map(json.loads, path.read_text().splitlines())
    (directive,) = line["_aws"]["CloudWatchMetrics"]
    assert directive["Dimensions"] == [["Service", "Model"]]
    assert {metric["Name"] for metric in directive["Metrics"]} <= line.keys()
    assert (line["Service"], line["Model"], line["Requests"]) == ("ridgeline", "demo", 250)
    assert line["OutputTokens"] == 2750 and line["Errors"] == 0
    assert line["TimeToFirstToken"] == [250.0] * 100  # no line has more than 100 values


def test_nothing_is_exported_unless_asked_for(tmp_path: Path) -> None:
    assert isinstance(open_telemetry(None, None, service="x"), NoTelemetry)
    with pytest.raises(BadInput, match="emf-file"):
        open_telemetry(None, str(tmp_path / "none" / "x"), service="x")
    pytest.importorskip("opentelemetry.sdk")
    with pytest.raises(BadInput, match="not a URL"):
        open_telemetry("localhost:4318", None, service="x")
