"""vLLM's routes that load and unload adapters while the server runs, and whether it may."""

from __future__ import annotations

import asyncio
from typing import Annotated, Protocol, runtime_checkable

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from ridgeline.serve.auth.middleware import caller_of
from ridgeline.serve.bodies.routing import JsonRoute
from ridgeline.serve.errors import ApiError
from ridgeline.serve.openai.schemas import Name, OpenBody
from ridgeline.serve.openapi import error_responses
from ridgeline.serve.service import Service, ServiceDep

router = APIRouter(tags=["Adapters"], route_class=JsonRoute)
"""Only included with `--allow-runtime-lora-updating`: a client names directories to read."""


@runtime_checkable
class AdapterHost(Protocol):
    """An engine whose adapters can be changed. Both methods raise BadInput for a bad name."""

    def load_adapter(self, name: str, directory: str) -> object: ...

    def unload_adapter(self, name: str) -> None: ...


class LoadAdapterRequest(OpenBody):
    """Body of `POST /v1/load_lora_adapter`. `lora_path`: a directory of the server's machine."""

    lora_name: Annotated[Name, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadAdapterRequest(OpenBody):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: Annotated[Name, Field(min_length=1)]


@router.post(
    "/v1/load_lora_adapter",
    summary="Load a LoRA adapter",
    operation_id="load_lora_adapter",
    response_class=PlainTextResponse,
    responses=error_responses(body=True),
)
async def load_lora_adapter(
    body: LoadAdapterRequest, request: Request, service: ServiceDep
) -> Response:
    host = _host(request, service)
    others = set(service.group.names) - set(service.engine.info.adapters)
    if body.lora_name in others:
        raise ApiError(400, "lora_name is the name of a served model", param="lora_name")
    await asyncio.to_thread(host.load_adapter, body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter",
    summary="Unload a LoRA adapter",
    operation_id="unload_lora_adapter",
    response_class=PlainTextResponse,
    responses=error_responses(404, body=True),
)
async def unload_lora_adapter(
    body: UnloadAdapterRequest, request: Request, service: ServiceDep
) -> Response:
    host, known = _host(request, service), service.engine.info.adapters
    if body.lora_name not in known:  # as vLLM says it
        loaded = ", ".join(f"`{name}`" for name in known) or "none is loaded"
        message = f"The adapter `{body.lora_name[:200]}` is not loaded; loaded: {loaded}"
        raise ApiError(404, message, param="lora_name")
    await asyncio.to_thread(host.unload_adapter, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _host(request: Request, service: Service) -> AdapterHost:
    """The engine, if its adapters can be changed; ApiError 403 without an administrator's key."""
    if not caller_of(request.scope).admin:
        raise ApiError(403, "this API key is not an administrator's")
    if not isinstance(service.engine, AdapterHost):
        raise ApiError(400, "this engine has no adapters")
    return service.engine
