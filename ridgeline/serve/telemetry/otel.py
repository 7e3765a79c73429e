"""OpenTelemetry: a span per request and the metrics of the GenAI conventions, by OTLP over HTTP.

Spans are made at the end of a request, with its instants; a thread of the SDK sends them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ridgeline.errors import BadInput
from ridgeline.records import Sampling
from ridgeline.serve.telemetry import names
from ridgeline.serve.telemetry.base import RequestRecord, RoutedRecord, RouteSpan

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_METRICS_INTERVAL_MS = 15_000
_CLOSE_TIMEOUT_MS = 2_000


class OtelTelemetry:
    """Sends to the collector at `endpoint`, which is asked for nothing: where it is away, spans
    are dropped."""

    def __init__(self, endpoint: str, service: str, version: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        except ImportError:
            raise BadInput(
                "--otlp-endpoint needs the OpenTelemetry SDK",
                fix="pip install 'ridgeline[otel]'",
            ) from None
        if not endpoint.startswith(("http://", "https://")):
            raise BadInput(
                "--otlp-endpoint is not a URL", value=endpoint, fix="write http://HOST:4318"
            )
        base = endpoint.rstrip("/")
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(f"{base}/v1/metrics", timeout=5),
            export_interval_millis=_METRICS_INTERVAL_MS,
        )
        self._open(OTLPSpanExporter(f"{base}/v1/traces", timeout=5), reader, service, version)

    def _open(
        self, exporter: SpanExporter, reader: MetricReader, service: str, version: str
    ) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource: Resource = Resource.create({"service.name": service, "service.version": version})
        self._traces: TracerProvider = TracerProvider(resource=resource)
        self._traces.add_span_processor(BatchSpanProcessor(exporter))
        self._meters: MeterProvider = MeterProvider([reader], resource=resource)
        self._tracer = self._traces.get_tracer("ridgeline", version)
        self._propagator = TraceContextTextMapPropagator()
        self._observe = _instruments(self._meters, version)

    def end_request(self, record: RequestRecord) -> None:
        """Export one request."""
        span = self._start(
            f"{record.operation} {record.model}",
            record.traceparent,
            record.began_ns,
            _attributes(record),
        )
        for name, seconds in (
            (names.EVENT_STARTED, record.started_s),
            (names.EVENT_FIRST_TOKEN, record.first_s),
        ):
            if seconds is not None:
                span.add_event(name, timestamp=record.began_ns + round(seconds * 1e9))
        if record.error:
            _mark_error(span, record.error)
        span.end(record.began_ns + round(record.ended_s * 1e9))
        self._observe(record)

    def begin_route(self, path: str, traceparent: str, scheme: str) -> RouteSpan:
        """Begin the span of a routed request. `scheme`: that which the client used."""
        attributes = {
            names.HTTP_METHOD: "POST",
            names.HTTP_ROUTE: path,
            names.URL_PATH: path,
            names.URL_SCHEME: scheme,
        }
        span = self._start(f"POST {path}", traceparent, time.time_ns(), attributes)
        carrier: dict[str, str] = {}
        from opentelemetry.trace import set_span_in_context

        self._propagator.inject(carrier, set_span_in_context(span))
        return _OtelRouteSpan(span, carrier.get("traceparent", ""))

    def close(self) -> None:
        """Send what is left, within two seconds."""
        with contextlib.suppress(Exception):  # a collector that is away ends no server
            self._traces.force_flush(_CLOSE_TIMEOUT_MS)
            self._traces.shutdown()
        with contextlib.suppress(Exception):
            self._meters.shutdown(_CLOSE_TIMEOUT_MS)

    def _start(
        self, name: str, traceparent: str, began_ns: int, attributes: dict[str, Any]
    ) -> Span:
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract({"traceparent": traceparent}) if traceparent else None
        return self._tracer.start_span(
            name, context, SpanKind.SERVER, attributes, start_time=began_ns
        )


class _OtelRouteSpan:
    def __init__(self, span: Span, traceparent: str) -> None:
        self._span, self.traceparent = span, traceparent

    def end(self, record: RoutedRecord) -> None:
        self._span.set_attributes(
            {
                names.HTTP_STATUS: record.status,
                names.BACKEND: record.backend,
                names.ATTEMPTS: record.num_attempts,
                names.RESUMED: record.is_resumed,
            }
        )
        if record.status >= 500:
            _mark_error(self._span, str(record.status))
        self._span.end()


def _mark_error(span: Span, error: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute(names.ERROR_TYPE, error)
    span.set_status(Status(StatusCode.ERROR))


def _attributes(record: RequestRecord) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        names.OPERATION: record.operation,
        names.PROVIDER: names.PROVIDER_NAME,
        names.REQUEST_MODEL: record.model,
        names.RESPONSE_MODEL: record.model,
        names.RESPONSE_ID: record.request_id,
        names.INPUT_TOKENS: record.input_tokens,
        names.OUTPUT_TOKENS: record.output_tokens,
        names.CACHED_TOKENS: record.cached_tokens,
    }
    optional = {
        **({} if record.sampling is None else _sampling(record.sampling)),
        names.FINISH_REASONS: record.finish_reasons or None,
        names.STREAMED: record.is_streamed or None,
        names.SLO_CLASS: record.slo_class or None,
        names.RESUMED: record.is_resumed or None,
        names.MIGRATED: record.is_migrated or None,
    }
    return attributes | {name: value for name, value in optional.items() if value is not None}


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """Attributes of the request's sampling; None for what it does without."""
    return {
        names.MAX_TOKENS: sampling.max_tokens,
        names.TEMPERATURE: sampling.temperature,
        names.TOP_P: sampling.top_p,
        names.TOP_K: sampling.top_k if sampling.top_k > 0 else None,
        names.SEED: sampling.seed,
        names.NUM_CHOICES: sampling.n if sampling.n != 1 else None,
        names.FREQUENCY_PENALTY: sampling.frequency_penalty or None,
        names.PRESENCE_PENALTY: sampling.presence_penalty or None,
    }


def _instruments(meters: MeterProvider, version: str) -> Callable[[RequestRecord], None]:
    """A function that observes a record."""
    meter = meters.get_meter("ridgeline", version)

    def histogram(name: str, unit: str, text: str, buckets: tuple[float, ...]) -> Any:
        return meter.create_histogram(
            name, unit, text, explicit_bucket_boundaries_advisory=list(buckets)
        )

    duration = histogram(names.DURATION, "s", "Duration of a request.", names.DURATION_BUCKETS)
    ttft = histogram(
        names.TIME_TO_FIRST_TOKEN,
        "s",
        "Time to the first token.",
        names.TIME_TO_FIRST_TOKEN_BUCKETS,
    )
    tpot = histogram(
        names.TIME_PER_OUTPUT_TOKEN,
        "s",
        "Time per token after the first.",
        names.TIME_PER_OUTPUT_TOKEN_BUCKETS,
    )
    observe_tokens = _token_instruments(meter, histogram)

    def observe(record: RequestRecord) -> None:
        labels: dict[str, Any] = {
            names.OPERATION: record.operation,
            names.PROVIDER: names.PROVIDER_NAME,
            names.REQUEST_MODEL: record.model,
            names.RESPONSE_MODEL: record.model,
        }
        error = {names.ERROR_TYPE: record.error} if record.error else {}
        if not record.is_migrated:
            duration.record(record.ended_s, labels | error)
        if record.ttft_s is not None:
            ttft.record(record.ttft_s, labels)
        if record.tpot_s is not None:
            tpot.record(record.tpot_s, labels)
        observe_tokens(record, labels)

    return observe


def _token_instruments(
    meter: Meter, histogram: Callable[..., Any]
) -> Callable[[RequestRecord, dict[str, Any]], None]:
    """A function that counts the tokens of a record: those used, and how many a request has."""

    def counter(name: str, text: str) -> Any:
        return meter.create_counter(name, "{token}", text)

    used = (
        counter(names.USED_INPUT_TOKENS, "Prompt tokens, cached ones included."),
        counter(names.USED_CACHED_TOKENS, "Prompt tokens found in the prefix cache."),
    )
    generated = counter(names.USED_OUTPUT_TOKENS, "Tokens of answers.")
    each = (
        histogram(
            names.EACH_INPUT_TOKENS, "{token}", "Prompt tokens of a request.", names.TOKEN_BUCKETS
        ),
        histogram(
            names.EACH_OUTPUT_TOKENS, "{token}", "Output tokens of a request.", names.TOKEN_BUCKETS
        ),
    )

    def observe(record: RequestRecord, labels: dict[str, Any]) -> None:
        text = labels | {names.MODALITY: names.TEXT}
        generated.add(record.generated_tokens, text)
        if record.is_migrated:  # the server that continues it counts the rest
            return
        for instrument, count in zip(
            used, (record.input_tokens, record.cached_tokens), strict=True
        ):
            instrument.add(count, text)
        each[0].record(record.input_tokens, labels)
        each[1].record(record.output_tokens, labels)

    return observe
