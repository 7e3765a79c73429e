"""What every route shares: one served model, its name, its numbers, its limits, its callers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import PurePath
from weakref import WeakSet

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.records import Sampling, Slo
from ridgeline.roofline import Peaks
from ridgeline.serve.auth.keys import load_keys
from ridgeline.serve.auth.middleware import caller_of
from ridgeline.serve.auth.rate_limit import Account, Accounts
from ridgeline.serve.config import Caps, ServerOptions
from ridgeline.serve.drain import Drain
from ridgeline.serve.engine_protocol import ServedEngine
from ridgeline.serve.errors import ApiError
from ridgeline.serve.generation.event_stream import encode, read_body
from ridgeline.serve.generation.respond import answer_headers, request_id_of
from ridgeline.serve.generation.stream import Job, RequestGroup, Terms, free
from ridgeline.serve.ids import fresh_id
from ridgeline.serve.metrics.registry import Metrics
from ridgeline.serve.openai.sampling_params import Prompt, check_cap


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says about how it wants to be served, whatever its endpoint."""

    priority: int | None = None
    cache_salt: str | None = None
    slo_class: str | None = None
    timeout_ms: float | None = None
    request_id: str | None = None
    ignored: tuple[str, ...] = ()


class Order(msgspec.Struct, frozen=True):
    """A job that was priced and accepted, and the headers that its answer carries."""

    job: Job
    headers: dict[str, str]


class Service:
    """See the head of this file."""

    def __init__(
        self,
        engine: ServedEngine,
        options: ServerOptions,
        *,
        peaks: Peaks | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.options, self.now = engine, options, now
        self.name = options.served_model_name or name_of(engine.info.model)
        self.caps: Caps = options.caps
        self.metrics = Metrics(
            engine, self.name, price_per_hour=options.price_per_hour, peaks=peaks
        )
        self.ring = load_keys(options.api_key, options.api_keys_file)
        self.drain = Drain()
        self.classes = options.classes
        self.accounts = Accounts(self.ring, options.requests_per_minute, options.tokens_per_minute)
        self.created = int(time.time())
        self._open: WeakSet[RequestGroup] = WeakSet()  # who is answered is forgotten by itself

    async def body(self, request: Request) -> bytes:
        """The request's body, within the limits of size and time."""
        return await read_body(request, self.caps.max_body_bytes, self.options.body_timeout_s)

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for another model's name; leaving it out means this one."""
        if name is not None and name != self.name:
            message = f"The model `{name[:200]}` does not exist; this server serves `{self.name}`"
            raise ApiError(404, message, param="model")

    def order(
        self,
        request: Request,
        kind: str,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        wish: Wish,
        *,
        scores_only: bool = False,
    ) -> Order:
        """Price a job and take its fee. ApiError 429 where its key is out of budget."""
        caller = caller_of(request.scope)
        account = self.accounts.of(caller, self.now())
        job = Job(
            id=fresh_id(f"{kind}-"),
            prompts=prompts,
            sampling=sampling,
            terms=self._terms(request, wish, caller.tenant(wish.cache_salt)),
            scores_only=scores_only,
            spent=free if scores_only else self._payer(account),
        )
        request_id = request_id_of(request.headers, wish.request_id, job.id)
        num_tokens = job.num_prompt_tokens
        check_cap("prompt", num_tokens, self.caps.max_prompt_tokens, "prompt tokens in one request")
        try:
            fee = account.charge(num_tokens, self.now())
        except ApiError:
            self.metrics.count_refused("rate_limit")
            raise
        return Order(job, answer_headers(request_id, wish.ignored) | fee)

    def group(self, job: Job, *, stream: bool) -> RequestGroup:
        """The requests of a job; of a whole answer nobody hears before a choice ends."""
        interval = self.options.stream_interval if stream else math.inf
        group = RequestGroup(self.engine, job, self.metrics, interval)
        self._open.add(group)
        return group

    def cut_off(self) -> None:
        """The server stops now: whoever still waits for an answer is told so."""
        for group in list(self._open):
            group.fail(self.drain.refusal())

    def _payer(self, account: Account) -> Callable[[int], None]:
        """Who is told of output tokens; called for every one of them."""
        if not account.counts_tokens:
            return free
        return lambda num_tokens: account.spent(num_tokens, self.now())

    def _terms(self, request: Request, wish: Wish, tenant: str) -> Terms:
        slo_class, slo = self._promise(wish.slo_class or request.headers.get("x-ridgeline-slo"))
        return Terms(
            priority=_priority(request) if wish.priority is None else wish.priority,
            tenant=tenant,
            timeout_s=None if wish.timeout_ms is None else wish.timeout_ms / 1000,
            slo_class=slo_class,
            slo=slo,
        )

    def _promise(self, asked: str | None) -> tuple[str, Slo | None]:
        name = asked or self.options.default_slo_class or next(iter(self.classes), None)
        if name is None:
            return "", None
        if name not in self.classes:
            known = ", ".join(self.classes) or "none are configured"
            raise ApiError(400, f"unknown slo_class; known: {known}", param="slo_class")
        return name, self.classes[name]


def name_of(model: str) -> str:
    """`demo` and `dummy:SHAPE` as they are; a directory by its last part."""
    return PurePath(model).name or model


def to_json(payload: object, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(encode(payload), media_type="application/json", headers=headers)


def _priority(request: Request) -> int:
    """vLLM's header: lower goes first."""
    given = request.headers.get("x-vllm-priority")
    if given is None:
        return 0
    digits = given.removeprefix("-")
    if not (digits.isdecimal() and len(digits) <= 3 and abs(int(digits)) <= 100):
        raise ApiError(400, "x-vllm-priority is not a whole number; limit: -100..100")
    return int(given)
