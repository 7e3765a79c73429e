"""Prompts computed by other servers than the answers: the gateway's part.

    body + {"do_remote_decode": true}  ──▶  a prefill server, which answers at once with a handle
    body + the handle                  ──▶  a decode server, which fetches the prompt's KV blocks

The handle is a hint: a decode server computes what it cannot fetch, so no failure here fails a
request. Servers that fail are tried no further, and the request goes on without a handle. A stream
that is resumed gets a new handle, which a prefill server with a warm cache gives quickly.

Servers that are not Ridgeline's are asked as `vllm_protocol` says, and answer once the prompt is
computed. A handle of theirs is for a decode server that is not Ridgeline's either.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric

from ridgeline.errors import DECODE_ERRORS
from ridgeline.fleet.backends import Backend, Backends
from ridgeline.fleet.call import RoutedCall
from ridgeline.fleet.prefill import vllm_protocol
from ridgeline.fleet.upstream import BackendLost
from ridgeline.serve.generation.handover import TRANSFER_FIELD

PATHS = frozenset(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"))
RESULTS = ("handed_over", "short", "whole", "no_server", "refused", "no_handle", "lost", "late")
"""What came of asking for a handle; all but the first leave the prompt to the decode server."""

MAX_TRIES = 2
TIMEOUT_S = 5.0
COMPUTE_TIMEOUT_S = 120.0  # where the answer comes once the prompt is computed
_MAX_BYTES = 1 << 20
_ASK = {"do_remote_decode": True, "do_remote_prefill": False}


class Handle:
    """The fields for the decode server, and the prefill server's load from now until `end`."""

    def __init__(self, backends: Backends, backend: Backend) -> None:
        self.fields: dict[str, Any] = {}
        self._backends, self._backend = backends, backend
        self._sent_s = backends.clock()
        self._is_over = False

    def begin(self, call: RoutedCall) -> None:
        self._backends.load.note_sent(self._backend.id, call.num_prompt)

    def end(self, call: RoutedCall, *, has_first: bool) -> None:
        """The prompt is computed, as the decode server's first byte says, or will not be."""
        if self._is_over:
            return
        self._is_over = True
        load, backend_id = self._backends.load, self._backend.id
        if has_first:
            now_s = self._backends.clock()
            load.note_first_token(backend_id, call.num_prompt, self._sent_s, now_s)
        else:
            load.note_lost(backend_id, call.num_prompt)
        load.note_ended(backend_id)


class PrefillControl(Protocol):
    """What the gateway asks of a prefill pool."""

    async def begin(self, call: RoutedCall, decoder: Backend) -> Handle | None: ...

    def metrics(self) -> Iterable[Metric]: ...


class NoPrefill:
    """Every server computes the prompts of its answers."""

    async def begin(self, call: RoutedCall, decoder: Backend) -> Handle | None:
        return None

    def metrics(self) -> Iterable[Metric]:
        return ()


class PrefillPool:
    """The prefill servers among `backends`, for prompts of at least `min_tokens` by estimate."""

    def __init__(self, backends: Backends, min_tokens: int) -> None:
        self._backends, self._min_tokens = backends, min_tokens
        self._counts: Counter[str] = Counter()

    async def begin(self, call: RoutedCall, decoder: Backend) -> Handle | None:
        """Have the prompt computed; None where `decoder` has to compute it."""
        result, handle = "whole", None
        if call.path in PATHS and decoder.role == "decode":
            result = "short"
            if call.num_prompt >= self._min_tokens:
                result, handle = await self._ask_servers(call, decoder)
        self._counts[result] += 1
        return handle

    def metrics(self) -> Iterable[Metric]:
        counter = CounterMetricFamily(
            "ridgeline_fleet_prefills",
            "Requests by what a prefill server did for them.",
            labels=["result"],
        )
        for result in RESULTS:
            counter.add_metric([result], self._counts[result])
        yield counter

    async def _ask_servers(self, call: RoutedCall, decoder: Backend) -> tuple[str, Handle | None]:
        result, tried = "no_server", set[int]()
        for _ in range(MAX_TRIES):
            backend = self._backends.choose_prefill(call, tried, decoder)
            if backend is None:
                break
            tried.add(backend.id)
            handle, fields = Handle(self._backends, backend), None
            handle.begin(call)
            try:
                result, fields = await self._ask(call, backend)
            finally:
                if fields is None or not backend.is_ridgeline:
                    handle.end(call, has_first=fields is not None)
            if fields is not None:
                handle.fields = fields
                return result, handle
            if result == "no_handle":
                break  # the request is none that can be handed over
        return result, None

    async def _ask(self, call: RoutedCall, backend: Backend) -> tuple[str, dict[str, Any] | None]:
        try:
            fields = msgspec.json.decode(call.body, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return "refused", None  # the decode server will say why
        asked, timeout_s = {**fields, "stream": False, TRANSFER_FIELD: _ASK}, TIMEOUT_S
        if not backend.is_ridgeline:
            if not vllm_protocol.can_hand_over(fields):
                return "no_handle", None
            asked = vllm_protocol.prefill_body(call.path, fields)
            timeout_s = COMPUTE_TIMEOUT_S
        body = msgspec.json.encode(asked)
        try:
            async with asyncio.timeout(timeout_s):
                path = call.path.encode()
                connection = await backend.pool.exchange(b"POST", path, call.headers, body)
                try:
                    answer = await connection.read_all(_MAX_BYTES)
                finally:
                    backend.pool.release(connection)
        except TimeoutError:
            return "late", None
        except BackendLost as lost:
            self._backends.note_lost(backend, lost)
            return "lost", None
        if connection.status != 200:
            return "refused", None
        return _handle_in(answer)


def _handle_in(answer: bytes) -> tuple[str, dict[str, Any] | None]:
    try:
        fields = msgspec.json.decode(answer).get(TRANSFER_FIELD)
    except (AttributeError, *DECODE_ERRORS):
        fields = None
    return ("handed_over", fields) if isinstance(fields, dict) else ("no_handle", None)
