"""What an exporter gets: one record per request, when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from starlette.requests import HTTPConnection

from ridgeline.records import Sampling

Operation = str
"""`chat`, `text_completion`, `embeddings` or the path of another route."""

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


def operation_of(request: HTTPConnection) -> Operation:
    """What the client asks for; `/invocations` has noted which route it stands for."""
    path: str = request.scope["path"]
    path = getattr(request.state, "path", path)
    return OPERATIONS.get(path, path)


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended.

    `began_ns` is Unix time; the rest are seconds after it: `started_s` on the engine, `first_s` the
    first token of this server, `ended_s` the end. None: it did not happen. `resumed_tokens`: those
    of the output that another server has generated; `is_migrated`: another one continues it, and
    counts it. `error` names what ended a request that failed: an HTTP status, an exception, or
    `cancelled`. `sampling`: None where nothing is sampled; `is_streamed`: its answer was sent in
    parts.
    """

    operation: Operation
    model: str
    request_id: str
    began_ns: int
    ended_s: float
    started_s: float | None = None
    first_s: float | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    resumed_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
    sampling: Sampling | None = None
    is_streamed: bool = False
    slo_class: str = ""
    is_resumed: bool = False
    is_migrated: bool = False
    error: str = ""
    traceparent: str = ""

    @property
    def generated_tokens(self) -> int:
        """Output tokens of this server."""
        return self.output_tokens - self.resumed_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time to the answer's first token; None where there is none, or it is another server's."""
        return None if self.resumed_tokens else self.first_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, over all choices."""
        num_gaps = self.generated_tokens - max(1, len(self.finish_reasons))
        if self.first_s is None or num_gaps <= 0:
            return None
        return (self.ended_s - self.first_s) / num_gaps


class RoutedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request that a gateway has routed. `backend`: the one that answered, or ""; `num_attempts`
    counts all that were tried."""

    path: str
    began_ns: int
    ended_s: float
    status: int
    backend: str = ""
    num_attempts: int = 1
    is_resumed: bool = False


class Telemetry(Protocol):
    """Takes records; `close` sends what is left."""

    def end_request(self, record: RequestRecord) -> None: ...

    def begin_route(self, path: str, traceparent: str, scheme: str) -> RouteSpan: ...

    def close(self) -> None: ...


class RouteSpan(Protocol):
    """A span of the gateway: its backends' spans are its children."""

    @property
    def traceparent(self) -> str:
        """The header for the backends; "" to pass the client's on."""
        ...

    def end(self, record: RoutedRecord) -> None: ...


class NoRouteSpan:
    """The span of a gateway that exports none."""

    traceparent = ""

    def end(self, record: RoutedRecord) -> None:
        pass


class NoTelemetry:
    """Exports nothing."""

    def end_request(self, record: RequestRecord) -> None:
        pass

    def begin_route(self, path: str, traceparent: str, scheme: str) -> RouteSpan:
        return NoRouteSpan()

    def close(self) -> None:
        pass


class SeveralTelemetries:
    """Passes records to several exporters; the first one's spans are the backends' parents."""

    def __init__(self, exporters: Sequence[Telemetry]) -> None:
        self._exporters = exporters

    def end_request(self, record: RequestRecord) -> None:
        for exporter in self._exporters:
            exporter.end_request(record)

    def begin_route(self, path: str, traceparent: str, scheme: str) -> RouteSpan:
        return _SeveralSpans([e.begin_route(path, traceparent, scheme) for e in self._exporters])

    def close(self) -> None:
        for exporter in self._exporters:
            exporter.close()


class _SeveralSpans:
    def __init__(self, spans: Sequence[RouteSpan]) -> None:
        self._spans = spans

    @property
    def traceparent(self) -> str:
        return next((span.traceparent for span in self._spans if span.traceparent), "")

    def end(self, record: RoutedRecord) -> None:
        for span in self._spans:
            span.end(record)
