"""Several models behind one address: each with a separate engine loop, queue and metrics.

A request names its model; without a name it gets the first one. Keys, rate limits and draining are
those of the server, so all models share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from ridgeline.serve.service import Service
    from ridgeline.serve.telemetry.base import Telemetry


class ModelGroup:
    """The services of one app, in the order of their names in `/v1/models`."""

    def __init__(self, first: Service) -> None:
        self.services: list[Service] = [first]

    @property
    def first(self) -> Service:
        return self.services[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Every model and adapter that a request can name."""
        return tuple(name for service in self.services for name in service.own_names)

    def find(self, name: Any) -> Service:
        """The service of a model or an adapter; the first one for any other value."""
        if len(self.services) > 1 and isinstance(name, str):
            for service in self.services:
                if name in service.own_names:
                    return service
        return self.first

    def render_metrics(self) -> bytes:
        """The metrics of all models on one page."""
        if len(self.services) == 1:
            return self.first.metrics.render()
        merged = CollectorRegistry()
        merged.register(_MergedFamilies([own.metrics.registry for own in self.services]))
        return generate_latest(merged)

    def export_to(self, telemetry: Telemetry) -> None:
        """Export the requests of every model."""
        for service in self.services:
            service.telemetry = telemetry

    def end_streams(self, refusal: Exception) -> None:
        """End every open response with an error: the server stops."""
        for service in self.services:
            service.end_own_streams(refusal)

    def fault(self) -> str | None:
        """What is broken in the first model that is; None if nothing is."""
        faults = (service.own_fault() for service in self.services)
        return next((fault for fault in faults if fault is not None), None)

    def lost(self) -> str | None:
        """Why the first engine that has stopped by itself did so; None if none has."""
        deaths = (service.engine.death for service in self.services)
        return next((death for death in deaths if death is not None), None)


class _MergedFamilies(Collector):
    """Each family of metrics once, with the samples of every registry."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def describe(self) -> list[Metric]:
        return []  # registering must not collect

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    # those of the process have no model, and are the same in every registry
                    known.samples += [own for own in family.samples if "model_name" in own.labels]
        yield from families.values()
