"""Follows the load of a fleet on Ray: the gateway's view in, numbers of servers out."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ridgeline.errors import DECODE_ERRORS
from ridgeline.fleet.page.view import FleetView
from ridgeline.fleet.ray.fleet_file import FleetModel
from ridgeline.http_replies import open_reply
from ridgeline.routing.autoscaler import Autoscaler, FleetSignals, ScalingPolicy
from ridgeline.routing.batch_demand import batch_demand

SCALING_S = 5.0
"""Time between two decisions."""

_READ_TIMEOUT_S = 5.0


class FleetScaler:
    """Decides for each model with `max_replicas` how many servers it has.

    `read_view` returns what the gateway sees, None if it does not answer; `set_replicas` changes a
    model's number of servers. `replicas`: how many were wanted last, where that is known; the first
    step makes it so.
    """

    def __init__(
        self,
        models: Sequence[FleetModel],
        read_view: Callable[[], FleetView | None],
        set_replicas: Callable[[FleetModel, int], None],
        replicas: Mapping[str, int] = {},
    ) -> None:
        self._models = [model for model in models if model.max_replicas is not None]
        self._read_view, self._set_replicas = read_view, set_replicas
        self._scalers = {model.name: Autoscaler(_policy(model)) for model in self._models}
        self.replicas = {m.name: scaled(m, replicas.get(m.name, 0)) for m in self._models}
        self._unsure = set(replicas)

    def step(self, now_s: float) -> None:
        """Decide once, and change what has to change."""
        view = self._read_view() if self._models else None
        for model in self._models:
            before = self.replicas[model.name]
            signals = None if view is None else _signals(view, model, before)
            wanted = self._scalers[model.name].decide(signals, now_s)
            if signals is None:  # nothing is known: nothing changes, and the floor holds
                wanted = max(before, model.replicas)
            if wanted != before or model.name in self._unsure:
                self._set_replicas(model, wanted)
                self.replicas[model.name] = wanted
                self._unsure.discard(model.name)


def scaled(model: FleetModel, count: int) -> int:
    """The count within the model's limits."""
    return min(max(count, model.replicas), model.max_replicas or model.replicas)


def read_gateway(url: str, api_key: str | None) -> FleetView | None:
    """The gateway's view of its fleet; None if it does not answer."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{url}/ridgeline/fleet", headers=headers)
    try:
        with open_reply(request, _READ_TIMEOUT_S) as response:
            return msgspec.json.decode(response.read(), type=FleetView)
    except (OSError, *DECODE_ERRORS):
        return None


def _policy(model: FleetModel) -> ScalingPolicy:
    assert model.max_replicas is not None
    return ScalingPolicy(
        target_in_flight=model.target_in_flight,
        min_replicas=model.replicas,
        max_replicas=model.max_replicas,
        allowed_wait_s=model.allowed_wait_s,
        stable_s=model.stable_s,
    )


def _signals(view: FleetView, model: FleetModel, num_replicas: int) -> FleetSignals:
    """The load of one model. Parked requests count for every model: none of theirs is ready."""
    own = [b for b in view.backends if model.model in b.models or model.name in b.models]
    in_flight = sum(backend.in_flight for backend in own) + view.num_parked
    oldest_s = max((backend.oldest_s for backend in own), default=0.0)
    return FleetSignals(
        in_flight=in_flight,
        num_replicas=num_replicas,
        queue_age_s=oldest_s,
        batch_demand=batch_demand((b.batch_store, b.batch_servers) for b in own),
    )
