"""The routes, the door before them, and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.roofline import Peaks
from ridgeline.serve import errors, operations, tokenize
from ridgeline.serve.anthropic import routes as messages
from ridgeline.serve.auth.middleware import OPEN_PATHS, Door, Guard
from ridgeline.serve.config import ServerOptions, names_of
from ridgeline.serve.engine_protocol import ServedEngine
from ridgeline.serve.http.fast_router import EXPECTED, Direct, Handlers
from ridgeline.serve.openai import embeddings, responses
from ridgeline.serve.openai import routes as openai
from ridgeline.serve.service import Service, name_of
from ridgeline.serve.web.page import add_page

Handler = Callable[[Service, Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/completions", openai.complete),
    ("POST", "/v1/chat/completions", openai.chat),
    ("POST", "/v1/embeddings", embeddings.embed),
    ("POST", "/v1/responses", responses.create),
    ("POST", "/v1/messages", messages.create),
    ("POST", "/v1/messages/count_tokens", messages.count),
    ("POST", "/tokenize", tokenize.tokenize),
    ("POST", "/detokenize", tokenize.detokenize),
    ("GET", "/v1/models", openai.models),
    ("GET", "/v1/models/{name:path}", openai.model),
    ("GET", "/health", operations.health),
    ("GET", "/ping", operations.health),
    ("POST", "/ping", operations.health),
    ("GET", "/ready", operations.ready),
    ("GET", "/version", operations.version),
    ("GET", "/metrics", operations.scrape),
    ("GET", "/openapi.json", operations.openapi),
)

ADMIN_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/health", operations.health),
    ("GET", "/ready", operations.ready),
    ("GET", "/metrics", operations.scrape),
    ("GET", "/admin/state", operations.state),
    ("POST", "/admin/drain", operations.drain),
    ("POST", "/admin/abort/{id}", operations.abort),
    ("GET", "/openapi.json", operations.admin_openapi),
)


def create_app(
    engine: ServedEngine, options: ServerOptions | None = None, *, peaks: Peaks | None = None
) -> Starlette:
    """The server over `engine`. `app.state.service` is what its routes share.

    `peaks`: what MFU and MBU are measured against.
    """
    service = Service(engine, options or ServerOptions(), peaks=peaks)
    app = _app(service, ROUTES)
    add_page(app, engine, service.name, service.options.promise, service.classes)
    app.add_middleware(Direct, handlers=_fixed(service, ROUTES))
    app.add_middleware(Guard, door=_door(service))
    return app


def create_admin_app(service: Service) -> Starlette:
    """The operator's routes over the same service, for a listener that only this machine reaches.

    Where keys are configured, an administrator's is needed.
    """
    app = _app(service, ADMIN_ROUTES)
    app.add_middleware(Guard, door=_door(service, admin_only=True))
    return app


def _app(service: Service, routes: tuple[tuple[str, str, Handler], ...]) -> Starlette:
    app = Starlette()
    for kind in (*EXPECTED, Exception):
        app.add_exception_handler(kind, errors.handle)
    for method, path, handler in routes:
        app.add_route(path, partial(handler, service), methods=[method])
    app.state.service = service
    return app


def _fixed(service: Service, routes: tuple[tuple[str, str, Handler], ...]) -> Handlers:
    """Those whose path has no parameter."""
    return {
        (method, path): partial(handler, service)
        for method, path, handler in routes
        if "{" not in path
    }


def _door(service: Service, **more: Any) -> Door:
    options = service.options
    return Door(
        ring=service.ring,
        drain=service.drain,
        hosts=frozenset(name.lower() for name in names_of(options.allowed_hosts)),
        origins=frozenset(names_of(options.allowed_origins)),
        open_paths=OPEN_PATHS,
        refused=service.metrics.count_refused,
        **more,
    )


__all__ = ["ADMIN_ROUTES", "ROUTES", "Service", "create_admin_app", "create_app", "name_of"]
