"""Traces and metrics of requests: what is recorded, and what a collector receives."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.errors import BadInput
from ridgeline.serve.app import create_app
from ridgeline.serve.telemetry import open_telemetry
from ridgeline.serve.telemetry.base import NoRouteSpan, NoTelemetry, RequestRecord, RouteSpan
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
    temperature=0.5,
    traceparent=PARENT,
)


class Recorder:
    """Telemetry that keeps the records."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def end_request(self, record: RequestRecord) -> None:
        self.records.append(record)

    def begin_route(self, path: str, traceparent: str) -> RouteSpan:
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
    assert record.traceparent == PARENT and record.max_tokens == 5
    assert record.output_tokens > 0 and record.finish_reasons
    assert record.first_s is not None and record.started_s is not None
    assert 0 <= record.started_s <= record.first_s <= record.ended_s
    assert record.input_tokens > 0


async def test_refused_request_is_no_record(client: httpx.AsyncClient, recorder: Recorder) -> None:
    assert (await client.post("/v1/completions", json={"prompt": "x", "n": 0})).status_code == 400
    assert recorder.records == []


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
    sums = {name: metrics[name].histogram.data_points[0].sum for name in metrics}
    assert sums["gen_ai.server.request.duration"] == 1.25
    assert sums["gen_ai.server.time_to_first_token"] == 0.25
    assert sums["gen_ai.server.time_per_output_token"] == pytest.approx(0.1)
    tokens = metrics["gen_ai.client.token.usage"].histogram.data_points
    assert {
        attributes(point.attributes)["gen_ai.token.type"].string_value: point.sum
        for point in tokens
    } == {"input": 7, "output": 11}


def test_backends_span_is_the_child_of_the_gateways(collector: Collector) -> None:
    telemetry = open_telemetry(collector.url, None, service="ridgeline-route")
    span = telemetry.begin_route("/v1/completions", PARENT)
    version, trace_id, span_id, _ = span.traceparent.split("-")
    assert (version, trace_id) == ("00", PARENT.split("-")[1]) and span_id != PARENT.split("-")[2]
    telemetry.close()


@pytest.mark.slow  # the SDK tries for two seconds
def test_collector_that_is_away_ends_nothing() -> None:
    pytest.importorskip("opentelemetry.sdk")
    telemetry = open_telemetry("http://127.0.0.1:9", None, service="ridgeline")
    telemetry.end_request(RECORD)
    start_s = time.monotonic()
    telemetry.close()
    assert time.monotonic() - start_s < 10


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
