"""Run a gateway until SIGINT or SIGTERM."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace
from starlette.types import ASGIApp

from ridgeline.config.server import CanaryOptions, FallbackOptions, RouteOptions, ServerOptions
from ridgeline.errors import BadInput
from ridgeline.fleet.app import GatewayService, create_gateway_app
from ridgeline.serve.server import GracefulServer, check_exposed, listen, url_of, uvicorn_config

_FILES_EACH = 2
"""A connection of a client, and one to a server."""


def route(
    options: RouteOptions,
    *,
    canary: CanaryOptions | None = None,
    fallback: FallbackOptions | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Route requests to the backends until SIGINT or SIGTERM.

    `on_ready` is called with the gateway's URL when requests are accepted. Raises BadInput.
    """
    server_options, service, app = prepare(options, canary, fallback)
    with listen(server_options, _FILES_EACH) as listener:
        bound = replace(server_options, port=listener.getsockname()[1])
        config = uvicorn_config(app, bound, _FILES_EACH)
        url = url_of(listener)
        server = GracefulServer(config, service, lambda: on_ready(url))
        server.closes_on_stop = options.close_on_stop
        server.run(sockets=[listener])


def prepare(
    options: RouteOptions, canary: CanaryOptions | None, fallback: FallbackOptions | None
) -> tuple[ServerOptions, GatewayService, ASGIApp]:
    """What is needed to run the gateway. Raises BadInput for options that it would refuse."""
    followed = options.backend_file is not None or options.backend_dns
    if not (options.backend or options.decode_backend or followed):
        raise BadInput(
            "a gateway needs a backend", fix="add --backend http://HOST:PORT, once per server"
        )
    if bool(options.prefill_backend) != bool(options.decode_backend):
        raise BadInput(
            "--prefill-backend and --decode-backend need each other",
            fix="name the servers that run with --disaggregation-mode prefill and decode",
        )
    server_options = ServerOptions(
        host=options.host,
        port=options.port,
        api_key=options.api_key,
        insecure=options.insecure,
        allowed_hosts=options.allowed_hosts,
        shutdown_timeout_s=options.shutdown_timeout_s,
    )
    check_exposed(server_options)
    service = GatewayService(server_options)
    return server_options, service, create_gateway_app(options, service, canary, fallback)
