"""Which replica gets the next request: policies for the simulator and for the gateway.

round-robin     each replica in turn
least-loaded    the replica with the fewest requests in flight
power-of-two    the less loaded of two random replicas
prefix-aware    the replica that has seen the longest prefix of the prompt, unless it is much
                busier than the least loaded one
session         the same replica for the same session
ttft            the replica with the least predicted time to first token, or the one with the
                most cached tokens among those that keep the request's TTFT SLO
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from ridgeline.errors import BadInput
from ridgeline.routing.base import Router

ROUTERS: Mapping[str, str] = MappingProxyType(
    {
        "round-robin": "ridgeline.routing.round_robin:RoundRobin",
        "least-loaded": "ridgeline.routing.least_loaded:LeastLoaded",
        "power-of-two": "ridgeline.routing.power_of_two:PowerOfTwo",
        "prefix-aware": "ridgeline.routing.prefix:PrefixAware",
        "session": "ridgeline.routing.session:SessionAffinity",
        "ttft": "ridgeline.routing.ttft:LeastTtft",
    }
)


def make_router(name: str, seed: int = 0) -> Router:
    """The policy called `name`. Raises BadInput that lists them for an unknown one."""
    if name not in ROUTERS:
        raise BadInput("unknown routing policy", value=name, limit=", ".join(ROUTERS))
    module, _, policy = ROUTERS[name].partition(":")
    router: Router = getattr(import_module(module), policy)(seed)
    return router
