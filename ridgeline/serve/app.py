"""The FastAPI apps: the public API, and the routes of the admin listener."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import APIRouter, FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

import ridgeline
from ridgeline.config.server import ServerOptions
from ridgeline.errors import BadInput, RidgelineError
from ridgeline.roofline import Peaks
from ridgeline.serve import invocations, operations, tokenize
from ridgeline.serve.adapters import routes as adapter_routes
from ridgeline.serve.anthropic import routes as anthropic_routes
from ridgeline.serve.anthropic.schemas import MessageEvent
from ridgeline.serve.auth.middleware import AccessMiddleware, AccessPolicy
from ridgeline.serve.bodies.memory import MAX_BODIES, BodyMemory
from ridgeline.serve.bodies.routing import BodyLimits
from ridgeline.serve.bodies.turns import BodyTurns
from ridgeline.serve.caching import routes as cache_routes
from ridgeline.serve.config import split_names
from ridgeline.serve.engine_protocol import ServedEngine
from ridgeline.serve.errors import (
    ApiError,
    error_response,
    in_words_of,
    to_api_error,
    validation_error,
)
from ridgeline.serve.metrics.loop_lag import watch_loop_lag
from ridgeline.serve.middleware import HttpMiddleware
from ridgeline.serve.openai import embeddings, responses_routes
from ridgeline.serve.openai import routes as openai_routes
from ridgeline.serve.openai.objects import ChatCompletionChunk, CompletionChunk, ResponseEvent
from ridgeline.serve.openapi import API_KEY_HEADER, BEARER, build_document
from ridgeline.serve.rerank import routes as rerank_routes
from ridgeline.serve.service import Service
from ridgeline.serve.web import page

_METHODS = ("GET", "HEAD", "POST", "DELETE")
_NO_ROUTE = "Not Found"
"""Starlette's detail for a path that is no route; this server's own 404s name what they miss."""


def create_app(
    engine: ServedEngine, options: ServerOptions | None = None, *, peaks: Peaks | None = None
) -> FastAPI:
    """The API over `engine`. `app.state.service` is shared by its routes.

    `peaks`: what MFU and MBU are measured against.
    """
    service = Service(engine, options or ServerOptions(), peaks=peaks)
    app = _new_app("Ridgeline", service)
    for router in (operations.probes, page.page_router):
        app.include_router(router)
    for router in (
        openai_routes.router,
        responses_routes.router,
        embeddings.router,
        invocations.router,
        rerank_routes.router,
        anthropic_routes.router,
        tokenize.router,
        cache_routes.router,
        operations.router,
        page.router,
    ):
        include_protected(app, router)
    if service.options.allow_runtime_lora_updating:
        include_protected(app, adapter_routes.router)
    app.openapi = partial(  # type: ignore[method-assign]  # FastAPI's way to extend the document
        build_document, app, (CompletionChunk, ChatCompletionChunk, ResponseEvent, MessageEvent)
    )
    return app


def add_model(
    app: FastAPI, engine: ServedEngine, options: ServerOptions, *, peaks: Peaks | None = None
) -> Service:
    """Serve a further model from the app. Raises BadInput if its name is taken."""
    first: Service = app.state.service
    service = Service(engine, options, peaks=peaks, group=first.group)
    taken = set(first.group.names) & set(service.own_names)
    if taken:
        raise BadInput("two served models have the same name", value=sorted(taken)[0])
    first.group.services.append(service)
    return service


def create_admin_app(service: Service) -> FastAPI:
    """The operators' routes over the same service, for a listener on the loopback interface.

    If keys are configured, an administrator's is needed.
    """
    app = _new_app("Ridgeline for operators", service, admin_only=True)
    app.include_router(operations.probes)
    for router in (operations.router, operations.admin_router):
        include_protected(app, router)
    app.openapi = partial(build_document, app)  # type: ignore[method-assign]  # as above
    return app


def include_protected(app: FastAPI, router: APIRouter) -> None:
    """Add routes that need a key, if keys are configured, and document that."""
    service: Service = app.state.service
    schemes = [Security(BEARER), Security(API_KEY_HEADER)] if service.keys else []
    app.include_router(router, dependencies=schemes)


def build_routes(app: FastAPI) -> None:
    """Build the models of all routes, which takes up to some tenths of a second.

    FastAPI would build them when it looks up the route of the first request, on the event loop.
    """
    for _ in iter_route_contexts(app.routes):
        pass


def _new_app(title: str, service: Service, *, admin_only: bool = False) -> FastAPI:
    # FastAPI's /docs would load its script from a CDN: it is off, and so is its /openapi.json
    app = FastAPI(
        title=title,
        version=ridgeline.__version__,
        openapi_url=None,
        lifespan=_lifespan,
    )
    options = service.options
    app.state.service = service
    app.state.body_limits = BodyLimits(options.max_body_bytes, options.body_timeout_s)
    max_held_bytes = MAX_BODIES * options.max_body_bytes
    app.state.body_memory = BodyMemory(max_held_bytes, max_held_bytes // 2)
    app.state.body_turns = BodyTurns()
    for kind in (HTTPException, RidgelineError, Exception):
        app.add_exception_handler(kind, _respond_to_error)
    app.add_exception_handler(RequestValidationError, _respond_to_invalid_request)
    policy = AccessPolicy(
        keys=service.keys,
        drain=service.drain,
        hosts=frozenset(name.lower() for name in split_names(options.allowed_hosts)),
        origins=frozenset(split_names(options.allowed_origins)),
        admin_only=admin_only,
        charge=None if admin_only else service.charge_request,
        count_refused=service.metrics.count_refused,
    )
    app.add_middleware(AccessMiddleware, policy=policy)
    app.add_middleware(HttpMiddleware, max_requests=options.max_num_connections)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Builds the routes; while the app is served, the lag of its event loop is measured."""
    await asyncio.to_thread(build_routes, app)
    service: Service = app.state.service
    watcher = asyncio.create_task(watch_loop_lag(service.metrics.observe_loop_lag))
    if service.options.warm_prompts is not None and not service.is_warmed:
        service.is_warmed = True  # the operators' app has a lifespan, too
        prompts = cache_routes.read_warm_prompts(Path(service.options.warm_prompts))
        await cache_routes.warm_at_start(service, prompts)
    try:
        yield
    finally:
        watcher.cancel()


async def _respond_to_error(request: Request, error: Exception) -> Response:
    """Every exception becomes an error body of the API that was called."""
    api_error = to_api_error(error)
    path = request.scope.get("path", "")
    if api_error.status_code == 405:
        allowed = _allowed_methods(request)
        message = f"{request.method} is not served at this path; limit: {allowed}"
        api_error = ApiError(405, message, headers={"allow": allowed})
    elif api_error.status_code == 404 and api_error.message == _NO_ROUTE:
        api_error = ApiError(404, _name_missing_route(request.app, path))
    return error_response(in_words_of(path, api_error), path)


async def _respond_to_invalid_request(request: Request, error: Exception) -> Response:
    """400 for a body or a parameter that does not fit its model."""
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    source, *location = errors[0]["loc"]
    if source == "body":
        in_body = [{**complaint, "loc": tuple(complaint["loc"][1:])} for complaint in errors]
        api_error = validation_error(in_body, error.body)
    else:
        field = ".".join(map(str, location))
        api_error = ApiError(400, f"{field}: {errors[0]['msg']}", param=field)
    return error_response(api_error, request.scope.get("path", ""))


def _name_missing_route(app: FastAPI, path: str) -> str:
    """The message for a path that is no route, with the routes that it may have meant."""
    path = path[:80].rstrip("/")
    paths = {str(route.path) for route in iter_route_contexts(app.routes) if route.path}
    near = difflib.get_close_matches(path, sorted(paths), n=2, cutoff=0.75)
    if f"/v1{path}" in paths:
        near = [f"/v1{path}"]
    fix = f"did you mean {' or '.join(near)}?" if near else "GET /openapi.json lists the routes"
    return f"there is no such path; got {path!r}; fix: {fix}"


def _allowed_methods(request: Request) -> str:
    """Methods of all routes of the path; Starlette lists those of the first one."""
    routes = request.app.router.routes
    allowed = [
        method
        for method in _METHODS
        if any(
            route.matches({**request.scope, "method": "GET" if method == "HEAD" else method})[0]
            is Match.FULL
            for route in routes
        )
    ]
    return ", ".join(sorted(allowed))
