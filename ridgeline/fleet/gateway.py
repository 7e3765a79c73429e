"""The gateway: an ASGI app that sends each request to one of several backends.

    choose a backend ─▶ relay its bytes ─▶ done
          ▲                    │
          └── lost, stopping, refused: what the client has stays valid

Before the first byte of a response, a request is sent again elsewhere. After it, a stream behind
Ridgeline is resumed: another backend continues with the next byte. Behind other servers it ends in
an error event: never in silence. A request that is found to be what crashes backends
(`crashes/blame.py`) is refused, and equal ones are as long as the evidence is strong.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

import msgspec
from starlette.types import Receive, Scope, Send

from ridgeline.fleet.attempt import Attempt, request_to_backend, response_headers
from ridgeline.fleet.backends import Backend, Backends
from ridgeline.fleet.batch.routes import BatchRoutes, is_batch_path
from ridgeline.fleet.call import RoutedCall, Trial, digest_of, prompt_pieces, read_body
from ridgeline.fleet.canary.controller import CanaryControl, NoCanary
from ridgeline.fleet.client_side import ClientResponse, read_request_body
from ridgeline.fleet.crashes.blame import STRONG, SUSPECT
from ridgeline.fleet.fallback import SERVED_BY, FallbackControl, NoFallback
from ridgeline.fleet.metrics import GatewayMetrics
from ridgeline.fleet.page.document import fleet_page
from ridgeline.fleet.page.view import FleetView
from ridgeline.fleet.parking import Parking
from ridgeline.fleet.prefill.pool import NoPrefill, PrefillControl
from ridgeline.fleet.reconnect import RetainedStreams
from ridgeline.fleet.relay import BrokenStream, StreamPosition, StreamRelay
from ridgeline.fleet.retry_budget import RetryBudget
from ridgeline.fleet.upstream import BackendLost, Headers, UpstreamConnection
from ridgeline.records import Slo
from ridgeline.routing.autoscaler import Autoscaler, ScalingPolicy
from ridgeline.serve.errors import ApiError, ClientDisconnected, error_response
from ridgeline.serve.generation.disconnect import cancel_on_disconnect
from ridgeline.serve.generation.resume import RESUMABLE_HEADER
from ridgeline.serve.metrics.registry import CONTENT_TYPE
from ridgeline.serve.telemetry.base import NoTelemetry, RoutedRecord, Telemetry

log = logging.getLogger("ridgeline.fleet")

GENERATION_PATHS = frozenset(
    ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/invocations")
)
ROUTED_PATHS = GENERATION_PATHS | {
    *("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/messages/count_tokens"),
    "/v1/responses/input_tokens",
    *("/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score"),
}
_MAX_ATTEMPTS = 64
_MAX_SETBACKS = 16
_ALONE_S = 5.0  # that a suspect waits for a backend without another one
_MAX_TRIAL_PAUSE_S = 1.0
_MAX_WHOLE_BYTES = 256 << 20
_RETRIED = (500, 502, 503, 504)
_MAX_RETRIES = 3
_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0
_HOP_HEADERS = {
    *(b"host", b"content-length", b"connection", b"keep-alive", b"transfer-encoding", b"te"),
    *(b"upgrade", b"expect", b"proxy-connection", b"trailer", b"accept-encoding"),
    *(RESUMABLE_HEADER.encode(), b"last-event-id"),
}


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`slo_classes`: SLOs by the name of their class, for policies that heed them."""

    max_body_bytes: int = 4 << 20
    slo_classes: dict[str, Slo] = {}
    scaling: ScalingPolicy = ScalingPolicy(target_in_flight=16)


class Gateway:
    """Routes requests to `backends`."""

    def __init__(
        self,
        backends: Backends,
        parking: Parking,
        budget: RetryBudget,
        config: GatewayConfig,
        canary: CanaryControl | None = None,
        fallback: FallbackControl | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.prefill: PrefillControl = NoPrefill()
        self.backends, self.parking, self._budget = backends, parking, budget
        self._config, self._telemetry = config, telemetry or NoTelemetry()
        self.canary, self.fallback = canary or NoCanary(), fallback or NoFallback()
        self.metrics = GatewayMetrics(backends, parking, Autoscaler(config.scaling))
        self._verdicts = backends.verdicts
        self._blame = self._verdicts.blame
        for part in (self.canary, self.fallback, self._verdicts):
            self.metrics.watch(part.metrics)
        self._retained, self._batches = RetainedStreams(), BatchRoutes(backends)
        backends.on_ready = parking.release

    def use_prefill(self, pool: PrefillControl) -> None:
        """Send prompts through a pool of prefill servers."""
        self.prefill = pool
        self.metrics.watch(pool.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        try:
            if scope["path"] in ROUTED_PATHS and scope["method"] == "POST":
                await self._route(scope, receive, send)
            elif is_batch_path(scope["path"]):
                await self._batches.handle(scope, receive, send)
            else:
                await self._page(scope, receive, send)
        except ApiError as error:
            if not isinstance(error, ClientDisconnected):
                await error_response(error, scope["path"])(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.backends.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.canary.stop()
        await asyncio.to_thread(self._telemetry.close)
        await self.backends.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The gateway's own pages."""
        path, content_type, body, status = scope["path"], b"application/json", b"", 200
        if path == "/":
            await self._web_page(send)
            return
        is_ready = any(backend.is_available for backend in self.backends.all)
        if path in ("/health", "/ping", "/ready"):
            if path != "/health" and not is_ready:
                raise ApiError(503, "no backend is ready")
        elif path == "/metrics":
            body, content_type = self.metrics.render(), CONTENT_TYPE.encode()
        elif path == "/ridgeline/fleet":
            body = msgspec.json.encode(self._view())
        elif path.startswith("/v1/models") and scope["method"] == "GET":
            body = self._models_page(path)
        elif path in ("/canary", "/canary/verdict") and self.canary.rollout is not None:
            rollout = self.canary.rollout
            body = msgspec.json.encode(rollout.record)
            status = 406 if path != "/canary" and rollout.state == "rolled-back" else 200
        else:
            raise ApiError(404, "the gateway does not route this path")
        headers = [(b"content-type", content_type)] if body else []
        await ClientResponse(path, send).whole(status, headers, body)

    def _models_page(self, path: str) -> bytes:
        """The list of models, or one of them."""
        cards = {
            model: {"id": model, "object": "model", "created": 0, "owned_by": "ridgeline"}
            for model in self.backends.models
        }
        if path == "/v1/models":
            return msgspec.json.encode({"object": "list", "data": list(cards.values())})
        name = path.removeprefix("/v1/models/")
        if name not in cards:
            raise self._unknown_model(name)
        return msgspec.json.encode(cards[name])

    def _unknown_model(self, name: str) -> ApiError:
        known = ", ".join(self.backends.models)
        message = f"The model `{name[:200]}` does not exist; served: {known}"
        return ApiError(404, message, param="model")

    async def _web_page(self, send: Send) -> None:
        document, policy = fleet_page()
        headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", policy.encode()),
            (b"cache-control", b"no-cache"),
            (b"referrer-policy", b"no-referrer"),
        ]
        await ClientResponse("/", send).whole(200, headers, document)

    def _view(self) -> FleetView:
        view, rollout = self.metrics.view(), self.canary.rollout
        if rollout is None:
            return view
        return msgspec.structs.replace(
            view, canary=rollout.state, canary_reasons=tuple(rollout.record.reasons)
        )

    # -- one request

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_request_body(receive, self._config.max_body_bytes)
        call = self._read_call(scope, body)
        self.metrics.count("requests")
        now_s = self.backends.clock()
        self._budget.note_request(now_s)
        self._refuse_condemned(call, now_s)
        response = ClientResponse(call.path, send, scope["headers"])
        self._reconnect(call, response)
        self.canary.begin(call)
        by_name, began_ns = dict(call.headers), time.time_ns()
        traceparent = by_name.get(b"traceparent", b"").decode("latin-1")
        span = self._telemetry.begin_route(call.path, traceparent, scope.get("scheme", "http"))
        if span.traceparent:
            call.headers = [p for p in call.headers if p[0] != b"traceparent"]
            call.headers.append((b"traceparent", span.traceparent.encode()))
        try:
            async with cancel_on_disconnect(receive):
                await self._serve(call, response)
            self.canary.end(call)
        except ApiError as error:
            if not isinstance(error, ClientDisconnected):
                call.status, call.has_failed = error.status_code, error.status_code >= 500
                self.canary.end(call)
            raise
        finally:
            span.end(_routed(call, began_ns))
            if response.has_event_ids:
                self._retained.keep(call)

    def _reconnect(self, call: RoutedCall, response: ClientResponse) -> None:
        """Continue the stream that the client names. Raises ApiError."""
        if response.last_event_id and not call.streamed:
            raise ApiError(400, "Last-Event-ID continues a stream, and this request asks for none")
        if response.last_event_id:
            call.relay = self._retained.continue_from(response.last_event_id, call.digest)
            self.metrics.count("reconnected")
        elif response.has_event_ids:
            call.relay = StreamRelay(StreamPosition(call.digest))

    def _read_call(self, scope: Scope, body: bytes) -> RoutedCall:
        headers: Headers = scope["headers"]
        by_name = dict(headers)
        fields, key = read_body(body), by_name.get(b"authorization", by_name.get(b"x-api-key", b""))
        if not self.backends.serves(fields.model):
            raise self._unknown_model(str(fields.model))
        prefix, num_prompt = prompt_pieces(fields, key)
        slo_class = fields.slo_class or by_name.get(b"x-ridgeline-slo", b"").decode("latin-1")
        slo = self._config.slo_classes.get(slo_class)
        session = by_name.get(b"x-session-id", b"").decode("latin-1")
        return RoutedCall(
            path=scope["path"],
            body=body,
            digest=digest_of(scope["path"], body),
            headers=[pair for pair in headers if pair[0] not in _HOP_HEADERS],
            model=fields.model,
            streamed=bool(fields.stream) and scope["path"] in GENERATION_PATHS,
            prefix=prefix,
            num_prompt=num_prompt,
            session=session or fields.prompt_cache_key or fields.user or str(prefix[:1]),
            ttft_slo_s=None if slo is None else slo.ttft_s,
            slo=slo,
            max_tokens=fields.output_limit,
            timeout_s=None if fields.timeout_ms is None else fields.timeout_ms / 1000,
        )

    async def _serve(self, call: RoutedCall, response: ClientResponse) -> None:
        """Send the call to backends until one has answered it."""
        try:
            for _ in range(_MAX_ATTEMPTS):
                backend = await self._choose(call)
                if await self._attempt(call, backend, response):
                    return
            raise ApiError(503, f"{_MAX_ATTEMPTS} attempts failed")
        except ApiError as error:
            if not response.has_started:
                raise
            self.metrics.count("lost")
            call.has_failed = True
            log.error("a stream is lost: %s", error.message)
            await response.fail(error)

    async def _choose(self, call: RoutedCall) -> Backend:
        loop = asyncio.get_running_loop()
        if call.fallback == "next":
            return self.fallback.choose(call, loop.time())
        deadline_s = loop.time() + min(self.parking.timeout_s, call.timeout_s or 1e9)
        fallback_s, alone_s = loop.time() + self.fallback.after_s, math.inf
        while True:
            call.trial = await self._trial(call, alone_s)
            backend = self.backends.choose(call)
            if backend is not None:
                return backend
            call.excluded.clear()
            if call.trial == "alone" and self.backends.ready_for(call):
                alone_s = min(alone_s, loop.time() + _ALONE_S)
            again_s = alone_s if loop.time() < alone_s else math.inf
            try:
                await self.parking.wait(min(deadline_s, fallback_s, again_s))
            except ApiError:
                if again_s <= loop.time() < min(deadline_s, fallback_s):
                    continue
                if self.fallback.admits(call, loop.time()):
                    return self.fallback.choose(call, loop.time())
                if loop.time() >= deadline_s or fallback_s > deadline_s:
                    raise
                fallback_s = math.inf

    async def _trial(self, call: RoutedCall, alone_s: float) -> Trial:
        """How the call may be tried next; ApiError if it is what crashes backends. Waits where that
        depends on whether a backend that broke off has crashed. From `alone_s` on, it need not be
        alone."""
        clock, blame = self.backends.clock, self._blame
        while self._verdicts.is_awaited(call.digest, clock()):
            await asyncio.sleep(_PAUSE_S)
        self._refuse_condemned(call, clock())
        evidence = blame.evidence(call.digest, clock())
        if evidence >= STRONG and asyncio.get_running_loop().time() < alone_s:
            # of two that wait for the same backend, the one that is quicker to test comes first
            await asyncio.sleep(min(blame.longest_s(call.digest), _MAX_TRIAL_PAUSE_S))
            return "alone"
        return "apart" if evidence >= SUSPECT else "none"

    def _refuse_condemned(self, call: RoutedCall, now_s: float) -> None:
        if self._blame.is_condemned(call.digest, now_s):
            self.metrics.count("denied")
            raise ApiError(500, "this request is refused: it, or an equal one, crashes backends")

    async def _attempt(self, call: RoutedCall, backend: Backend, response: ClientResponse) -> bool:
        """One backend's turn; False if another one has to continue."""
        attempt = Attempt(call, backend, self.backends, self.parking)
        is_resumed = call.num_attempts > 1 and call.relay.num_units > 0
        try:
            is_fallback = self.fallback.is_backend(backend)
            if is_fallback:
                request = self.fallback.request(call)
            else:
                attempt.handle = await self.prefill.begin(call, backend)
                request = request_to_backend(call, attempt.handle)
            patience = 2.0**call.num_setbacks  # each move loses work: only slow servers lose more
            connection = await backend.pool.exchange(b"POST", *request, patience=patience)
            if is_fallback:
                connection.headers.append(SERVED_BY)
            try:
                if connection.status != 200:
                    is_done = await self._pass_on_error(attempt, connection, response)
                    attempt.is_answered = is_done
                    return is_done
                is_done = attempt.is_answered = await attempt.answer(connection, response)
            finally:
                backend.pool.release(connection)
            if is_resumed and attempt.has_progressed:
                self.metrics.count("resumed")
            if not is_done:  # the backend is stopping, and said so
                self.metrics.count("migrated")
                self.backends.mark_draining(backend)
                call.excluded = {backend.id}
            return is_done
        except (BackendLost, BrokenStream) as lost:
            self._note_lost(attempt, lost, response)
            return False
        finally:
            attempt.end()
            if self.fallback.is_backend(backend):
                self.fallback.end(call, asyncio.get_running_loop().time())

    async def _pass_on_error(
        self, attempt: Attempt, connection: UpstreamConnection, response: ClientResponse
    ) -> bool:
        """Try elsewhere if that may help and is within the budget; else the error is the answer."""
        call, backend, status = attempt.call, attempt.backend, connection.status
        body = await connection.read_all(_MAX_WHOLE_BYTES)
        call.excluded.add(backend.id)
        is_own = not self.fallback.is_backend(backend)
        if is_own and status == 503 and (b"connection", b"close") in connection.headers:
            self.backends.mark_draining(backend)
            if backend.id not in call.stopping:  # a server that stops has cost nothing
                call.stopping.add(backend.id)
                return False
        call.num_retries += 1
        if status >= 500:
            call.failed_arms.add(backend.arm)
        if response.has_started:
            if status not in _RETRIED and status != 429:
                raise ApiError(502, "a backend refused to continue the stream")
            await asyncio.sleep(min(_MAX_PAUSE_S, _PAUSE_S * 1.2**call.num_retries))
            return False
        now_s = self.backends.clock()
        if status in _RETRIED and call.num_retries <= _MAX_RETRIES and self._budget.grant(now_s):
            self.metrics.count("retried")
            return False
        if status in (*_RETRIED, 429) and self.fallback.admits(
            call, asyncio.get_running_loop().time()
        ):
            call.fallback = "next"
            return False
        call.status = status
        await response.whole(status, response_headers(connection), body)
        return True

    def _note_lost(
        self, attempt: Attempt, lost: BackendLost | BrokenStream, response: ClientResponse
    ) -> None:
        """The backend broke off. Raises ApiError if no other may continue."""
        call, backend = attempt.call, attempt.backend
        call.excluded = {backend.id}
        call.failed_arms.add(backend.arm)
        is_refusal = isinstance(lost, BackendLost) and lost.is_refusal  # it never saw the request
        if isinstance(lost, BackendLost) and not self.fallback.is_backend(backend):
            if not is_refusal:
                attempt.note_broken()
            self.backends.note_lost(backend, lost)
        if not is_refusal:
            call.num_setbacks = 1 if attempt.has_progressed else call.num_setbacks + 1
        if call.num_setbacks >= _MAX_SETBACKS:
            raise ApiError(502, f"{_MAX_SETBACKS} backends in a row broke off")
        if response.has_started and not call.relay.is_resumable:
            raise ApiError(502, f"the backend broke off ({lost}): its stream cannot be resumed")


def _routed(call: RoutedCall, began_ns: int) -> RoutedRecord:
    """The call, as it ended. Status 499: the client has gone."""
    return RoutedRecord(
        path=call.path,
        began_ns=began_ns,
        ended_s=(time.time_ns() - began_ns) / 1e9,
        status=call.status or 499,
        backend=call.backend,
        num_attempts=call.num_attempts,
        is_resumed=call.num_attempts > 1 and call.relay.num_units > 0,
    )
