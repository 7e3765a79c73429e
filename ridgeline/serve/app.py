"""The routes. Each one reads, translates, asks the engine, and words the answer."""

from __future__ import annotations

import hmac
import time
import uuid
from pathlib import PurePath

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

import ridgeline
from ridgeline.errors import RidgelineError
from ridgeline.serve import errors
from ridgeline.serve.answer import answer
from ridgeline.serve.asks import Asks, Job
from ridgeline.serve.chat import ChatVoice
from ridgeline.serve.completions import CompletionVoice
from ridgeline.serve.contract import ServedEngine
from ridgeline.serve.errors import ApiError, ClientGone
from ridgeline.serve.metrics import CONTENT_TYPE, Metrics
from ridgeline.serve.requests import ChatRequest, CompletionRequest, read
from ridgeline.serve.translate import (
    chat_prompt,
    chat_sampling,
    completion_prompts,
    completion_sampling,
    scores_only,
)
from ridgeline.serve.wire import encode, read_body

OPEN_PATHS = ("/health", "/ping", "/version", "/metrics")


def create_app(
    engine: ServedEngine, *, served_model_name: str | None = None, api_key: str | None = None
) -> FastAPI:
    """The server over `engine`.

    `served_model_name` is what clients ask for (default: the model's, for a directory its last
    part). With `api_key`, every route but health, version and metrics wants `Authorization: Bearer
    KEY`.
    """
    service = Service(engine, served_model_name or name_of(engine.info.model))
    app = FastAPI(title="Ridgeline", version=ridgeline.__version__, docs_url=None, redoc_url=None)
    for kind in (ApiError, ClientGone, RidgelineError, HTTPException, Exception):
        app.add_exception_handler(kind, errors.handle)
    app.add_api_route("/v1/completions", service.complete, methods=["POST"])
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    app.add_api_route("/v1/models", service.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", service.model, methods=["GET"])
    app.add_api_route("/health", service.health, methods=["GET"])
    app.add_api_route("/ping", service.health, methods=["GET", "POST"])
    app.add_api_route("/version", service.version, methods=["GET"])
    app.add_api_route("/metrics", service.scrape, methods=["GET"])
    if api_key:
        app.add_middleware(KeyGuard, api_key=api_key)
    app.state.metrics = service.metrics
    return app


def name_of(model: str) -> str:
    """`demo` and `dummy:SHAPE` as they are; a directory by its last part."""
    return PurePath(model).name or model


class Service:
    """One served model: its engine, its name, its numbers."""

    def __init__(self, engine: ServedEngine, name: str) -> None:
        self.engine, self.name = engine, name
        self.metrics = Metrics(engine, name)
        self._created = int(time.time())

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked = read(CompletionRequest, await read_body(request))
        self._check_model(asked.model)
        job = Job(
            id=f"cmpl-{uuid.uuid4().hex}",
            sampling=completion_sampling(asked),
            prompts=await completion_prompts(asked, self.engine.tokenizer),
            priority=asked.priority or 0,
            tenant=asked.cache_salt or "",
            scores_only=scores_only(asked),
        )
        voice = CompletionVoice(asked, job, self.engine.tokenizer)
        return await answer(request, asked, job, self._asks(job), voice, self.name)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = read(ChatRequest, await read_body(request))
        self._check_model(asked.model)
        job = Job(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            sampling=chat_sampling(asked),
            prompts=[await chat_prompt(asked, self.engine.tokenizer)],
            priority=asked.priority or 0,
            tenant=asked.cache_salt or "",
        )
        voice = ChatVoice(asked, job, self.engine.tokenizer)
        return await answer(request, asked, job, self._asks(job), voice, self.name)

    async def models(self) -> Response:
        """GET /v1/models."""
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        """GET /v1/models/NAME."""
        self._check_model(name)
        return _json(self._card())

    async def health(self) -> Response:
        """GET /health: 200 while the engine makes progress, else 503."""
        if self.engine.healthy():
            return Response(status_code=200)
        return errors.response(ApiError(503, "the engine makes no progress"))

    async def version(self) -> Response:
        """GET /version."""
        return _json({"version": ridgeline.__version__})

    async def scrape(self) -> Response:
        """GET /metrics."""
        return Response(self.metrics.render(), headers={"content-type": CONTENT_TYPE})

    def _asks(self, job: Job) -> Asks:
        return Asks(self.engine, job, self.metrics)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"The model `{name[:200]}` does not exist; this server serves `{self.name}`"
            raise ApiError(404, message, param="model")

    def _card(self) -> dict[str, object]:
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "ridgeline",
            "root": self.name,
            "parent": None,
            "max_model_len": self.engine.info.max_model_len,
        }


class KeyGuard:
    """Turns away requests without the key; guards every route that is not open."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
            return
        await errors.response(ApiError(401, "the API key is missing or wrong"))(
            scope, receive, send
        )

    def _knows(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)


def _json(payload: object) -> Response:
    return Response(encode(payload), media_type="application/json")
