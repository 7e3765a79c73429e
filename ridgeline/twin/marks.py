"""How a twin says that it is one: a header on every response, and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-ridgeline-twin"


class TwinHeader:
    """Adds `x-ridgeline-twin: 1 x h100-sxm, modelled` to every response."""

    def __init__(self, app: ASGIApp, description: str) -> None:
        self._app, self._value = app, description.encode("latin-1", "replace")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (HEADER.encode(), self._value)]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_marked)


class TwinCollector(Collector):
    """`ridgeline_twin 1`, and how far steps were behind their modelled times.

    `late_s` returns the sum in seconds: if it grows, this machine was too busy for the twin, and
    its latencies are not those of the model.
    """

    def __init__(self, description: str, late_s: Callable[[], float]) -> None:
        self._description, self._late_s = description, late_s

    def collect(self) -> Iterable[Metric]:
        twin = GaugeMetricFamily(
            "ridgeline_twin", "1: the device is only modelled.", labels=["device"]
        )
        twin.add_metric([self._description], 1.0)
        yield twin
        text = "Seconds that steps ended later than modelled, because this machine was busy."
        yield CounterMetricFamily("ridgeline_twin_late_seconds", text, value=self._late_s())


def register(registry: CollectorRegistry, description: str, late_s: Callable[[], float]) -> None:
    """Add the metrics of a twin to a registry."""
    registry.register(TwinCollector(description, late_s))
