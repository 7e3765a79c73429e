"""The gateway with the checks that every request passes: keys, Host, Origin, header size."""

from __future__ import annotations

from starlette.types import ASGIApp

from ridgeline.config.server import RouteOptions, ServerOptions
from ridgeline.fleet.backends import Backends
from ridgeline.fleet.gateway import Gateway, GatewayConfig
from ridgeline.fleet.parking import Parking
from ridgeline.fleet.retry_budget import RetryBudget
from ridgeline.fleet.upstream import BackendAddress
from ridgeline.routing import make_router
from ridgeline.routing.autoscaler import ScalingPolicy
from ridgeline.serve.auth.keys import load_keys
from ridgeline.serve.auth.middleware import AccessMiddleware, AccessPolicy
from ridgeline.serve.config import split_names
from ridgeline.serve.drain import DrainState
from ridgeline.serve.middleware import HttpMiddleware


class GatewayService:
    """What the server needs to stop the gateway gracefully."""

    def __init__(self, options: ServerOptions) -> None:
        self.options, self.drain = options, DrainState()

    def end_streams(self) -> None:
        """Streams that are still open break off with their connections: the gateway stops."""


def create_gateway_app(options: RouteOptions, service: GatewayService) -> ASGIApp:
    """The app over the backends of `options`. Raises BadInput for a URL that is none."""
    key = options.api_key
    backends = Backends(
        [BackendAddress.parse(url) for url in options.backend],
        make_router(options.policy),
        silence_s=options.silence_s,
        headers=[] if key is None else [(b"authorization", f"Bearer {key}".encode())],
    )
    gateway = Gateway(
        backends,
        Parking(options.max_num_parked, options.park_timeout_s),
        RetryBudget(options.retry_share),
        GatewayConfig(
            max_body_bytes=service.options.max_body_bytes,
            slo_classes=options.parsed_slo_classes,
            scaling=_scaling(options),
        ),
    )
    policy = AccessPolicy(
        keys=load_keys(key, None),
        drain=service.drain,
        hosts=frozenset(name.lower() for name in split_names(options.allowed_hosts)),
    )
    return HttpMiddleware(
        AccessMiddleware(gateway, policy), max_requests=service.options.max_num_connections
    )


def _scaling(options: RouteOptions) -> ScalingPolicy:
    ttfts = [slo.ttft_s for slo in options.parsed_slo_classes.values() if slo.ttft_s is not None]
    return ScalingPolicy(
        target_in_flight=options.target_in_flight, allowed_wait_s=min(ttfts, default=None)
    )
