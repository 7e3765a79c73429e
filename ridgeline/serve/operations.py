"""Routes for operators and their tools: probes, version, metrics, and the admin listener's."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

import ridgeline
from ridgeline.serve.errors import ApiError, error_response
from ridgeline.serve.generation.respond import json_response
from ridgeline.serve.generation.resume import BATCH_HEADER, INSTANCE_HEADER
from ridgeline.serve.metrics.registry import CONTENT_TYPE
from ridgeline.serve.openai.objects import NonNegative
from ridgeline.serve.openapi import error_responses, probe_responses
from ridgeline.serve.service import Service, ServiceDep

probes = APIRouter(tags=["Operations"])
"""Routes without a key."""
router = APIRouter(tags=["Operations"])
admin_router = APIRouter(tags=["Admin"])
"""Routes of the admin listener only."""


class VersionResponse(TypedDict):
    """Version of the server."""

    version: str


class StateResponse(TypedDict):
    """Resolved configuration with the reason for each value, counters and levels."""

    model: str
    settings: dict[str, Any]
    derivations: dict[str, Any]
    counters: dict[str, float]
    draining: bool
    requests_in_progress: NonNegative


class DrainResponse(TypedDict):
    """The server is draining."""

    draining: Literal[True]


class AbortResponse(TypedDict):
    """The id of the aborted request."""

    aborted: str


@probes.get(
    "/health",
    summary="200 while the engine makes progress",
    operation_id="health",
    response_class=Response,
    responses=probe_responses(),
)
async def health(service: ServiceDep) -> Response:
    return _health(service)


@probes.get(
    "/ping",
    summary="As /health",
    operation_id="ping",
    response_class=Response,
    responses=probe_responses(),
)
@probes.post(
    "/ping",
    summary="As /health",
    operation_id="post_ping",
    response_class=Response,
    responses=probe_responses(),
)
async def ping(service: ServiceDep) -> Response:
    return _health(service)


@probes.get(
    "/ready",
    summary="200 while new requests are accepted",
    operation_id="ready",
    response_class=Response,
    responses=probe_responses(),
)
async def ready(service: ServiceDep) -> Response:
    if service.drain.is_draining:
        return _named(service, error_response(service.drain.refusal()))
    return _health(service)


@router.get(
    "/version",
    summary="Version of the server",
    operation_id="version",
    response_model=VersionResponse,
    responses=error_responses(),
)
async def version() -> Response:
    current: VersionResponse = {"version": ridgeline.__version__}
    return json_response(current)


@router.get(
    "/openapi.json",
    summary="This document",
    operation_id="openapi",
    response_model=None,
    responses=error_responses(),
)
async def openapi(request: Request) -> Response:
    return json_response(await asyncio.to_thread(request.app.openapi))


@router.get(
    "/metrics",
    summary="Metrics in the Prometheus text format",
    operation_id="metrics",
    response_class=Response,
    responses=error_responses()
    | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(service: ServiceDep) -> Response:
    return Response(service.group.render_metrics(), headers={"content-type": CONTENT_TYPE})


@admin_router.get(
    "/admin/state",
    summary="Resolved configuration, counters and levels",
    operation_id="state",
    response_model=StateResponse,
    responses=error_responses(),
)
async def state(service: ServiceDep) -> Response:
    info = service.engine.info
    current: StateResponse = {
        "model": service.name,
        "settings": dict(info.settings),
        "derivations": dict(info.derivations),
        "counters": dict(service.engine.counters()),
        "draining": service.drain.is_draining,
        "requests_in_progress": service.drain.num_in_progress,
    }
    return json_response(current)


@admin_router.post(
    "/admin/drain",
    summary="Shut down gracefully, as SIGTERM does",
    operation_id="drain",
    response_model=DrainResponse,
    responses=error_responses(),
)
async def drain(service: ServiceDep) -> Response:
    service.drain.start(service.options.shutdown_timeout_s)
    draining: DrainResponse = {"draining": True}
    return json_response(draining)


@admin_router.post(
    "/admin/abort/{id}",
    summary="Abort a request by the id of its response",
    operation_id="abort",
    response_model=AbortResponse,
    responses=error_responses(),
)
async def abort(id: str, service: ServiceDep) -> Response:
    service.engine.abort(id)
    aborted: AbortResponse = {"aborted": id}
    return json_response(aborted)


def _health(service: Service) -> Response:
    fault = service.fault()
    if fault is not None:
        return _named(service, error_response(ApiError(503, fault)))
    return _named(service, Response(status_code=200))


def _named(service: Service, response: Response) -> Response:
    """The response, with this process's id, by which a gateway tells a restart from a cut
    connection, and with what the batch requests need."""
    response.headers[INSTANCE_HEADER] = service.instance
    if service.batch_demand is not None:
        response.headers[BATCH_HEADER] = service.batch_demand()
    return response
