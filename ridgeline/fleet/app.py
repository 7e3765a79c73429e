"""The gateway with the checks that every request passes: keys, Host, Origin, header size."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp

from ridgeline.config.server import CanaryOptions, FallbackOptions, RouteOptions, ServerOptions
from ridgeline.errors import BadInput
from ridgeline.fleet.backends import Backends
from ridgeline.fleet.canary.controller import CanaryControl, CanaryController, NoCanary
from ridgeline.fleet.canary.rollout import Rollout, RolloutConfig
from ridgeline.fleet.discovery.backend_file import BackendFile
from ridgeline.fleet.discovery.backend_name import BackendName
from ridgeline.fleet.discovery.followed import FollowedBackends
from ridgeline.fleet.fallback import FallbackConfig, FallbackControl, ManagedApi, NoFallback
from ridgeline.fleet.gateway import Gateway, GatewayConfig
from ridgeline.fleet.parking import Parking
from ridgeline.fleet.prefill.pool import PrefillPool
from ridgeline.fleet.retry_budget import RetryBudget
from ridgeline.fleet.upstream import BackendAddress
from ridgeline.routing import make_router
from ridgeline.routing.autoscaler import ScalingPolicy
from ridgeline.serve.auth.keys import load_keys
from ridgeline.serve.auth.middleware import AccessMiddleware, AccessPolicy
from ridgeline.serve.config import split_names
from ridgeline.serve.drain import DrainState
from ridgeline.serve.middleware import HttpMiddleware
from ridgeline.serve.telemetry import open_telemetry


class GatewayService:
    """What the server needs to stop the gateway gracefully."""

    def __init__(self, options: ServerOptions) -> None:
        self.options, self.drain = options, DrainState()

    def lost(self) -> None:
        """A gateway has no engine to lose: its backends come and go."""

    def end_streams(self) -> None:
        """Streams that are still open break off with their connections: the gateway stops."""


def create_gateway_app(
    options: RouteOptions,
    service: GatewayService,
    canary: CanaryOptions | None = None,
    fallback: FallbackOptions | None = None,
) -> ASGIApp:
    """The app over the backends of `options`. Raises BadInput for a URL that is none."""
    canary, fallback = canary or CanaryOptions(), fallback or FallbackOptions()
    key = options.api_key
    followed, canaries = _followed(options), addresses_of(canary.canary)
    for address in {*followed.addresses} & {*canaries}:
        raise BadInput(
            "a server is both --backend and --canary",
            value=str(address),
            fix="name it once: a canary is compared with the others",
        )
    backends = Backends(
        followed.addresses,
        make_router(options.policy),
        silence_s=options.silence_s,
        stall_s=options.stream_silence_s,
        canaries=canaries,
        headers=[] if key is None else [(b"authorization", f"Bearer {key}".encode())],
    )
    backends.add(addresses_of(options.decode_backend), "decode")
    backends.add(addresses_of(options.prefill_backend), "prefill")
    backends.on_start.append(lambda: followed.watch(backends))
    gateway = Gateway(
        backends,
        Parking(options.max_num_parked, options.park_timeout_s),
        RetryBudget(options.retry_share),
        GatewayConfig(
            max_body_bytes=service.options.max_body_bytes,
            slo_classes=options.parsed_slo_classes,
            scaling=_scaling(options),
        ),
        _canary(canary, backends),
        _fallback(fallback, backends),
        open_telemetry(options.otlp_endpoint, None, service="ridgeline-route"),
    )
    if options.prefill_backend:
        gateway.use_prefill(PrefillPool(backends, options.prefill_min_tokens))
    policy = AccessPolicy(
        keys=load_keys(key, None),
        drain=service.drain,
        hosts=frozenset(name.lower() for name in split_names(options.allowed_hosts)),
    )
    return HttpMiddleware(
        AccessMiddleware(gateway, policy), max_requests=service.options.max_num_connections
    )


def addresses_of(urls: Sequence[str]) -> list[BackendAddress]:
    """Of the URLs, in their order and each once. Raises BadInput."""
    return list(dict.fromkeys(map(BackendAddress.parse, urls)))


def _followed(options: RouteOptions) -> FollowedBackends:
    files = [] if options.backend_file is None else [BackendFile(options.backend_file)]
    names = map(BackendName, options.backend_dns)
    return FollowedBackends(addresses_of(options.backend), [*files, *names])


def _canary(options: CanaryOptions, backends: Backends) -> CanaryControl:
    if not options.canary:
        return NoCanary()
    config = RolloutConfig(
        stages=options.shares,
        min_sessions=options.canary_min_sessions,
        min_tokens=options.canary_min_tokens,
        alpha=options.canary_alpha,
        max_disagreement=options.canary_max_disagreement,
        max_slowdown=options.canary_max_slowdown,
    )
    return CanaryController(
        Rollout(config), backends, options.canary_shadow_share, options.canary_state
    )


def _fallback(options: FallbackOptions, backends: Backends) -> FallbackControl:
    if options.fallback_url is None:
        return NoFallback()
    config = FallbackConfig(
        api_key=options.fallback_api_key,
        model=options.fallback_model,
        input_price=options.fallback_input_price,
        output_price=options.fallback_output_price,
        dollars_per_hour=options.fallback_dollars_per_hour,
        after_s=options.fallback_after_s,
    )
    address = BackendAddress.parse(options.fallback_url)
    return ManagedApi(backends.make(address), config)


def _scaling(options: RouteOptions) -> ScalingPolicy:
    ttfts = [slo.ttft_s for slo in options.parsed_slo_classes.values() if slo.ttft_s is not None]
    return ScalingPolicy(
        target_in_flight=options.target_in_flight, allowed_wait_s=min(ttfts, default=None)
    )
