"""Metrics of a gateway. Every series exists from the start, at zero."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ridgeline.fleet.backends import Backends
from ridgeline.fleet.page.view import BackendView, FleetView
from ridgeline.fleet.parking import Parking
from ridgeline.routing.autoscaler import Autoscaler, FleetSignals
from ridgeline.routing.batch_demand import batch_demand

_COUNTERS = {
    "requests": "Requests that were routed.",
    "resumed": "Streams that another backend continued.",
    "migrated": "Resumed streams whose backend asked for it, because it was stopping.",
    "lost": "Streams that ended in an error because no backend could continue them.",
    "retried": "Requests that were sent to another backend before their response began.",
    "denied": "Requests refused because they, or equal ones, crash backends.",
    "reconnected": "Streams continued for a client that had lost its connection.",
}
_STATES = ("ready", "late", "starting", "draining", "down")


class GatewayMetrics:
    """Counters by name, and the state of the backends at the time of a scrape."""

    def __init__(self, backends: Backends, parking: Parking, autoscaler: Autoscaler) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._counters = {
            name: Counter(f"ridgeline_fleet_{name}", text, registry=self.registry)
            for name, text in _COUNTERS.items()
        }
        self._collector = _BackendCollector(backends, parking, autoscaler)
        self.registry.register(self._collector)

    def watch(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Add the series of a part of the gateway, read at each scrape."""
        self.registry.register(_PartCollector(collect))

    def count(self, name: str) -> None:
        self._counters[name].inc()

    def totals(self) -> dict[str, int]:
        """What was counted since the start, by name."""
        return {
            name: int(next(iter(counter.collect())).samples[0].value)
            for name, counter in self._counters.items()
        }

    def view(self) -> FleetView:
        """The fleet as the web page and `ridgeline fleet top` show it."""
        return self._collector.view(self.totals())

    def render(self) -> bytes:
        """The page that a scraper reads."""
        return generate_latest(self.registry)


class _PartCollector(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


class _BackendCollector(Collector):
    def __init__(self, backends: Backends, parking: Parking, autoscaler: Autoscaler) -> None:
        self._backends, self._parking, self._autoscaler = backends, parking, autoscaler

    def collect(self) -> Iterable[Metric]:
        load = self._backends.load
        backends = [backend for backend in self._backends.all if not backend.is_removed]
        states = GaugeMetricFamily(
            "ridgeline_fleet_backends", "Backends, by state.", labels=["state"]
        )
        for state in _STATES:
            states.add_metric([state], sum(backend.state == state for backend in backends))
        yield states
        parked = GaugeMetricFamily(
            "ridgeline_fleet_parked", "Requests that wait for a backend to be ready."
        )
        parked.add_metric([], self._parking.num_parked)
        yield parked
        suspects = GaugeMetricFamily(
            "ridgeline_fleet_suspects", "Requests running that were on a backend when it crashed."
        )
        suspects.add_metric([], sum(backend.num_suspects for backend in backends))
        yield suspects
        in_flight = GaugeMetricFamily(
            "ridgeline_fleet_in_flight", "Requests in flight, by backend.", labels=["backend"]
        )
        queued = GaugeMetricFamily(
            "ridgeline_fleet_queued_tokens",
            "Prompt tokens, by estimate, of requests without a first token, by backend.",
            labels=["backend"],
        )
        for backend in backends:
            in_flight.add_metric([str(backend.address)], load.in_flight[backend.id])
            queued.add_metric([str(backend.address)], load.queued_tokens[backend.id])
        yield in_flight
        yield queued
        yield from self._scaling()

    def view(self, counts: dict[str, int]) -> FleetView:
        """The same state as one record."""
        backends, load = self._backends, self._backends.load
        shown = [backend for backend in backends.all if not backend.is_removed]
        age_s, wanted = self._decide()
        now_s, since_s = backends.clock(), dict[int, float]()
        for backend_id, sent_s in backends.waiting.values():
            since_s[backend_id] = min(sent_s, since_s.get(backend_id, sent_s))
        return FleetView(
            backends=tuple(
                BackendView(
                    url=str(backend.address),
                    state=backend.state,
                    arm=backend.arm,
                    models=backend.models,
                    in_flight=load.in_flight[backend.id],
                    queued_tokens=load.queued_tokens[backend.id],
                    prefill_tok_s=load.prefill_rate(backend.id),
                    oldest_s=now_s - since_s.get(backend.id, now_s),
                    batch_store=backend.batches.store,
                    batch_servers=backend.batches.servers,
                )
                for backend in shown
            ),
            models=backends.models,
            num_parked=self._parking.num_parked,
            num_suspects=sum(backend.num_suspects for backend in shown),
            oldest_s=age_s,
            wanted_replicas=wanted,
            counts=counts,
        )

    def _decide(self) -> tuple[float, int]:
        """Age of the oldest request without a byte of its response, and the replicas wanted."""
        backends, now_s = self._backends, self._backends.clock()
        age_s = now_s - min((sent_s for _, sent_s in backends.waiting.values()), default=now_s)
        signals = FleetSignals(
            in_flight=sum(backends.load.in_flight) + self._parking.num_parked,
            num_replicas=sum(backend.is_available for backend in backends.all),
            queue_age_s=age_s,
            batch_demand=batch_demand(
                (b.batches.store, b.batches.servers) for b in backends.all if b.is_available
            ),
        )
        return age_s, self._autoscaler.decide(signals, now_s)

    def _scaling(self) -> Iterable[Metric]:
        age_s, num_wanted = self._decide()
        oldest = GaugeMetricFamily(
            "ridgeline_fleet_oldest_seconds",
            "Time that the oldest request without a byte of its response has waited.",
        )
        oldest.add_metric([], age_s)
        yield oldest
        wanted = GaugeMetricFamily(
            "ridgeline_wanted_replicas", "Replicas that the load needs, by the autoscaler."
        )
        wanted.add_metric([], num_wanted)
        yield wanted
