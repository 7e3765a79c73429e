"""What operators and their tools ask: alive, ready, which version, which numbers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

import ridgeline
from ridgeline.serve import errors
from ridgeline.serve.errors import ApiError
from ridgeline.serve.metrics.registry import CONTENT_TYPE
from ridgeline.serve.openapi.document import admin_document, document
from ridgeline.serve.service import Service, to_json


async def health(service: Service, _request: Request) -> Response:
    """GET /health: 200 while the engine makes progress, else 503. Draining is not ill."""
    if service.engine.is_healthy():
        return Response(status_code=200)
    return errors.response(ApiError(503, "the engine makes no progress"))


async def ready(service: Service, _request: Request) -> Response:
    """GET /ready: 200 while new requests are welcome."""
    if service.drain.is_draining:
        return errors.response(service.drain.refusal())
    return await health(service, _request)


async def version(_service: Service, _request: Request) -> Response:
    """GET /version."""
    return to_json({"version": ridgeline.__version__})


async def openapi(_service: Service, request: Request) -> Response:
    """GET /openapi.json: with the Batch API where this server has it."""
    paths = {getattr(route, "path", None) for route in request.app.routes}
    return to_json(document(batches="/v1/batches" in paths))


async def admin_openapi(_service: Service, _request: Request) -> Response:
    """GET /openapi.json of the operators' listener."""
    return to_json(admin_document())


async def scrape(service: Service, _request: Request) -> Response:
    """GET /metrics."""
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def state(service: Service, _request: Request) -> Response:
    """GET /admin/state: the resolved configuration, with the reason for each value, and levels."""
    info = service.engine.info
    return to_json(
        {
            "model": service.name,
            "settings": info.settings,
            "derivations": info.derivations,
            "counters": dict(service.engine.counters()),
            "draining": service.drain.is_draining,
            "under_way": service.drain.num_under_way,
        }
    )


async def drain(service: Service, _request: Request) -> Response:
    """POST /admin/drain: as SIGTERM."""
    service.drain.begin(service.options.shutdown_timeout_s)
    return to_json({"draining": True})


async def abort(service: Service, request: Request) -> Response:
    """POST /admin/abort/ID: end one request by the id of its answer."""
    service.engine.abort(request.path_params["id"])
    return to_json({"aborted": request.path_params["id"]})
