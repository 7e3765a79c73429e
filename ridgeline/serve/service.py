"""What all routes share: the served model, its limits, metrics, keys and budgets."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated
from weakref import WeakSet

from fastapi import Depends, Request
from msgspec.structs import replace

from ridgeline.config.server import ServerOptions
from ridgeline.records import KvTransferParams, Sampling, Slo
from ridgeline.roofline import Peaks
from ridgeline.serve.auth.keys import Caller, load_keys
from ridgeline.serve.auth.middleware import caller_of
from ridgeline.serve.auth.rate_limit import KeyBudget, KeyBudgets
from ridgeline.serve.auth.tenant_secret import tenant_secret
from ridgeline.serve.bodies.routing import JsonRequest
from ridgeline.serve.config import LIMITS, model_name
from ridgeline.serve.context.selection import CompressedTexts
from ridgeline.serve.drain import DrainState
from ridgeline.serve.engine_protocol import ServedEngine
from ridgeline.serve.errors import ApiError, ClientDisconnected, check_limit
from ridgeline.serve.generation.handover import (
    TRANSFER_FIELD,
    TRANSFER_KEY,
    Handover,
    Leases,
    NoLeases,
)
from ridgeline.serve.generation.ids import new_id
from ridgeline.serve.generation.prompt_reader import PromptReader
from ridgeline.serve.generation.request import (
    ComparedMessage,
    GenerationRequest,
    Question,
    RequestOptions,
    SchedulingParams,
    TokenPrompt,
    charge_nothing,
)
from ridgeline.serve.generation.respond import request_id, response_headers
from ridgeline.serve.generation.resume import (
    IDENTITY_HEADER,
    LOG_KEY,
    RESUMABLE_HEADER,
    RESUME_FIELD,
    SCOPE_KEY,
    ResumePoint,
    StreamIdentity,
    draw_seed,
)
from ridgeline.serve.generation.stream import (
    MAX_UNREAD_CHARS,
    EventSource,
    RequestTimes,
    ResponseStream,
)
from ridgeline.serve.metrics.registry import Metrics
from ridgeline.serve.model_group import ModelGroup
from ridgeline.serve.response_cache.cache import FoundAnswer, ResponseCache, response_key
from ridgeline.serve.response_cache.replay import AnswerRecorder, AnswerReplay
from ridgeline.serve.response_cache.semantic import SemanticIndex, open_index, place_of
from ridgeline.serve.telemetry.base import NoTelemetry, RequestRecord, Telemetry, operation_of
from ridgeline.similarity import MAX_QUESTION_TOKENS

RESPONSE_CACHE_HEADER = "x-ridgeline-response-cache"
"""Says "hit" where an answer was stored, "semantic-hit" where that of a similar question was, and
"miss" where it may be from now on."""

MAX_COMPRESSED_CHARS = 8 << 20
"""Of documents that were compressed, to be used again."""


class Service:
    """One served model. `peaks`: what MFU and MBU are measured against; `now`: the rate limits'
    clock, in seconds."""

    def __init__(
        self,
        engine: ServedEngine,
        options: ServerOptions,
        *,
        peaks: Peaks | None = None,
        now: Callable[[], float] = time.monotonic,
        group: ModelGroup | None = None,
    ) -> None:
        self.engine, self.options, self.now = engine, options, now
        self.name = options.served_model_name or model_name(engine.info.model)
        price = options.price_per_hour
        self.metrics = Metrics(
            engine,
            self.name,
            price_per_hour=None if price is None else price * engine.info.twin_speed,
            peaks=peaks,
            slo_classes=options.parsed_slo_classes,
        )
        self.group = group or ModelGroup(self)
        if group is None:
            self.keys = load_keys(options.api_key, options.api_keys_file)
            if self.keys:
                self.keys = self.keys.with_secret(_tier_secret(engine))
            self.drain, self.instance = DrainState(), secrets.token_hex(8)
            self.budgets = KeyBudgets(
                self.keys, options.requests_per_minute, options.tokens_per_minute
            )
        else:
            first = group.first
            self.keys, self.drain, self.budgets = first.keys, first.drain, first.budgets
            self.instance = first.instance
        self.slo_classes = options.parsed_slo_classes
        self.created = int(time.time())
        self.has_batches = self.is_warmed = False
        self.response_cache: ResponseCache | None = None
        if options.response_cache_size is not None:
            self.response_cache = ResponseCache(
                options.response_cache_size,
                options.response_cache_ttl,
                now,
                open_index(engine, options),
            )
            self.metrics.register_response_cache(self.response_cache)
        self.compressed_texts = CompressedTexts(MAX_COMPRESSED_CHARS)
        self.telemetry: Telemetry = NoTelemetry()
        self.leases: Leases = NoLeases()
        self.health_checks: list[Callable[[], str | None]] = [self._engine_fault]
        self.batch_demand: Callable[[], str] | None = None
        self._streams: WeakSet[ResponseStream] = WeakSet()

    def check_model(self, name: str | None, *, allow_adapters: bool = True) -> str:
        """The name of the model as the response gives it: the base model's or an adapter's.

        ApiError 404 for another model's name; None means the base model.
        """
        if name is None or name == self.name:
            return self.name
        if name not in self.engine.info.adapters:
            known = ", ".join(f"`{own}`" for own in self.group.names)
            message = f"The model `{name[:200]}` does not exist; this server serves {known}"
            raise ApiError(404, message, param="model")
        if not allow_adapters:
            message = f"The adapter `{name}` is not served here; fix: name `{self.name}`"
            raise ApiError(400, message, param="model")
        return name

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of the model and of its adapters."""
        return (self.name, *self.engine.info.adapters)

    def submit(
        self,
        http_request: Request,
        id_prefix: str,
        prompts: Sequence[TokenPrompt],
        sampling: Sampling,
        options: RequestOptions,
        *,
        streamed: bool,
        score_only: bool = False,
    ) -> ResponseStream:
        """Admit a request and charge its key. The engine gets it when the stream is first read.

        ApiError 400 for a bad option, 429 if the key's budget is used up.
        """
        caller = caller_of(http_request.scope)
        transfer, options = self._transfer_of(http_request, options)
        num_tokens = sum(len(prompt.tokens) for prompt in prompts)
        scheduling = self._scheduling(http_request.headers, options, caller)
        _check_priority(scheduling.priority, caller)
        resume: ResumePoint | None = http_request.scope.get(SCOPE_KEY)
        is_resumable = RESUMABLE_HEADER in http_request.headers
        identity = resume or StreamIdentity(
            id=new_id(f"{id_prefix}-"), created=int(time.time()), seed=draw_seed()
        )
        if resume is not None and len(resume.tokens) > len(prompts) * sampling.n:
            raise ApiError(400, f"{RESUME_FIELD} has more choices than the request")
        own_id, num_resumed = identity.id, resume.num_tokens if resume else 0
        sent_id = request_id(http_request.headers, options.request_id, own_id)
        _check_size(num_tokens, sampling, options.scoring_field)
        budget = self.budgets.of(caller, self.now())
        request = GenerationRequest(
            id=own_id,
            created=identity.created,
            prompts=prompts,
            sampling=sampling,
            scheduling=scheduling,
            score_only=score_only,
            charge=charge_nothing if score_only else self._charger(budget),
            headers=response_headers(sent_id, options.ignored)
            | dict(options.headers)
            | self.charge_prompts(budget, prompts, num_resumed)
            | (identity.header() if is_resumable else {}),
            is_resumable=is_resumable,
            seed=identity.seed if is_resumable else None,
            resume=resume if is_resumable else None,
            log=http_request.scope.get(LOG_KEY),
            prediction=options.prediction,
            adapter=self._adapter(options),
            cache=options.cache,
            grammar_field=options.grammar_field,
        )
        request = self._with_transfer(request, transfer)
        source, request = self._source_of(request, options)
        stream = ResponseStream(
            source,
            request,
            self.metrics,
            interval=self.options.stream_interval if streamed else math.inf,
            max_unread_chars=MAX_UNREAD_CHARS if streamed else math.inf,
            on_end=self._recorder(http_request, request, is_streamed=streamed),
        )
        self._streams.add(stream)
        return stream

    @property
    def compares_questions(self) -> bool:
        """Whether a request may get the stored answer to a similar one."""
        return self.response_cache is not None and self.response_cache.index is not None

    async def read_question(
        self,
        http_request: Request,
        prompt: TokenPrompt,
        sampling: Sampling,
        options: RequestOptions,
        message: ComparedMessage,
    ) -> Question | None:
        """The embedding of a message; None where no answer may be stored, or one is stored for the
        exact request. One forward pass over the message."""
        cache = self.response_cache
        if cache is None or cache.index is None or sampling.structured is not None:
            return None
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            return None
        request = GenerationRequest(
            id="",
            prompts=[prompt],
            sampling=sampling,
            scheduling=self._scheduling(
                http_request.headers, options, caller_of(http_request.scope)
            ),
            resume=http_request.scope.get(SCOPE_KEY),
            adapter=self._adapter(options),
            cache=options.cache,
        )
        key = response_key(request, self.name)
        if key is None or key in cache:
            return None
        tokens = self.engine.tokenizer.encode(message.text)
        if not 0 < len(tokens) <= MAX_QUESTION_TOKENS:
            return None
        embedding = await asyncio.wrap_future(self.engine.embed(tokens, self.engine.info.pooling))
        return Question(message.rest, cache.index.calibration.direction(embedding))

    def _transfer_of(
        self, http_request: Request, options: RequestOptions
    ) -> tuple[KvTransferParams | None, RequestOptions]:
        """What the request says about its prompt's KV blocks; ignored without the role for it."""
        transfer: KvTransferParams | None = http_request.scope.get(TRANSFER_KEY)
        if transfer is None or not (transfer.do_remote_decode or transfer.do_remote_prefill):
            return None, options
        role = "prefill" if transfer.do_remote_decode else "decode"
        if self.engine.info.settings.get("disaggregation_mode") in (role, "both"):
            return transfer, options
        return None, replace(options, ignored=(*options.ignored, TRANSFER_FIELD))

    def _with_transfer(
        self, request: GenerationRequest, transfer: KvTransferParams | None
    ) -> GenerationRequest:
        """The request, whose prompt another server has computed or wants to have computed.

        A prompt that cannot be handed over is answered with one token, as vLLM would.
        """
        if transfer is None:
            return request
        policy, sampling = request.cache, request.sampling
        is_movable = (
            len(request.prompts) == 1
            and sampling.prompt_logprobs is None
            and not request.adapter
            and (policy is None or policy.max_cached_tokens is None)
        )
        if transfer.do_remote_prefill:
            return replace(request, kv_source=transfer) if is_movable else request
        tokens = request.prompts[0].tokens
        params = self.leases.open_lease(tokens) if is_movable else None
        if params is None:
            return replace(request, sampling=replace(sampling, max_tokens=1, min_tokens=0))
        cancel = partial(self.leases.close_lease, params.remote_request_id)
        return replace(
            request,
            prompts=[TokenPrompt(tokens[: params.num_tokens])],
            sampling=Sampling(temperature=0.0, max_tokens=1),
            handover=Handover(params, cancel),
            is_resumable=False,
            resume=None,
            prediction=(),
        )

    def _source_of(
        self, request: GenerationRequest, options: RequestOptions
    ) -> tuple[EventSource, GenerationRequest]:
        """What generates the answer, and the request with the header that says so."""
        cache, question = self.response_cache, options.question
        is_stored = not options.must_compute and request.handover is None
        key = response_key(request, self.name) if is_stored else None
        if cache is None or key is None:
            return self.engine, request
        place = None if question is None else place_of(question, request, self.name)
        source: EventSource
        found = cache.find(key, place)
        if found is None:
            source = AnswerRecorder(self.engine, cache, key, request, place)
        else:
            source = AnswerReplay(found.answer, self.metrics.now)
            self._prolong_pins(request)
        headers = {**request.headers, RESPONSE_CACHE_HEADER: _result_text(found, cache.index)}
        if found is not None and found.similarity is not None:
            # another server would compute another answer, and so not continue this one
            headers.pop(IDENTITY_HEADER, None)
            request = replace(request, is_resumable=False)
        return source, replace(request, headers=headers)

    def _prolong_pins(self, request: GenerationRequest) -> None:
        """Pin what a request marks that a stored answer serves: as long as if it were computed."""
        policy, who = request.cache, request.scheduling
        if policy is None or not policy.pin_tokens:
            return
        for prompt in request.prompts:
            self.engine.pin_prefix(prompt.tokens, policy, who.tenant, who.account)

    def _adapter(self, options: RequestOptions) -> str:
        return "" if options.model in (None, self.name) else str(options.model)

    def _recorder(
        self, http_request: Request, request: GenerationRequest, *, is_streamed: bool
    ) -> Callable[[RequestTimes], None] | None:
        """A function that exports the request when it has ended; None without telemetry."""
        telemetry = self.telemetry
        if isinstance(telemetry, NoTelemetry):
            return None
        operation = operation_of(http_request)
        traceparent = http_request.headers.get("traceparent", "")

        def record(times: RequestTimes) -> None:
            telemetry.end_request(
                RequestRecord(
                    operation=operation,
                    model=request.adapter or self.name,
                    request_id=request.id,
                    began_ns=times.began_ns,
                    started_s=times.started_s,
                    first_s=times.first_s,
                    ended_s=times.ended_s,
                    input_tokens=times.usage.prompt_tokens,
                    cached_tokens=times.usage.cached_tokens,
                    output_tokens=times.usage.completion_tokens,
                    finish_reasons=times.reasons,
                    sampling=request.sampling,
                    is_streamed=is_streamed,
                    slo_class=request.scheduling.slo_class,
                    is_resumed=request.resume is not None,
                    resumed_tokens=times.resumed_tokens,
                    is_migrated=times.is_migrated,
                    error=times.error,
                    traceparent=traceparent,
                )
            )

        return record

    @contextlib.contextmanager
    def exported(self, http_request: Request, request_id: str, num_tokens: int) -> Iterator[None]:
        """Export what runs inside, a request of `num_tokens` that samples none."""
        began_ns, error = time.time_ns(), ""
        try:
            yield
        except (ClientDisconnected, asyncio.CancelledError):
            error = "cancelled"
            raise
        except Exception as failure:
            error = str(getattr(failure, "status_code", type(failure).__name__))
            raise
        finally:
            self.telemetry.end_request(
                RequestRecord(
                    operation=operation_of(http_request),
                    model=self.name,
                    request_id=request_id,
                    began_ns=began_ns,
                    ended_s=(time.time_ns() - began_ns) / 1e9,
                    input_tokens=num_tokens,
                    error=error,
                    traceparent=http_request.headers.get("traceparent", ""),
                )
            )

    def charge_request(self, caller: Caller) -> None:
        """Charge a request to a key before its body is read; ApiError 429 if it is over budget."""
        self.budgets.of(caller, self.now()).charge_request(self.now())

    def prompt_reader(self, http_request: Request) -> PromptReader:
        """Tokenises the texts of a request, and charges them to its key before."""
        budget = self.budgets.of(caller_of(http_request.scope), self.now())
        return PromptReader(
            self.engine.tokenizer,
            self.engine.info.max_model_len,
            partial(self.charge, budget),
        )

    def charge_prompts(
        self, budget: KeyBudget, prompts: Sequence[TokenPrompt], num_resumed: int = 0
    ) -> dict[str, str]:
        """Charge what was not charged before the texts were tokenised, and resumed output, which
        costs the same work; as `charge`."""
        num_tokens = sum(len(prompt.tokens) - prompt.num_charged for prompt in prompts)
        return self.charge(budget, max(0, num_tokens) + num_resumed)

    def charge(self, budget: KeyBudget, num_tokens: int) -> dict[str, str]:
        """Charge tokens to a key; the rate limit headers. ApiError 429 if it is over budget."""
        try:
            return budget.charge_prompt(num_tokens, self.now())
        except ApiError:
            self.metrics.count_refused("rate_limit")
            raise

    def fault(self) -> str | None:
        """What is broken in any of the server's models; None if nothing is."""
        return self.group.fault()

    def own_fault(self) -> str | None:
        """What is broken, by the health checks of this model's parts; None if nothing is."""
        faults = (check() for check in self.health_checks)
        return next((fault for fault in faults if fault is not None), None)

    def _engine_fault(self) -> str | None:
        return None if self.engine.is_healthy() else "the engine makes no progress"

    def lost(self) -> str | None:
        """Why a model of the server can answer nothing any more; None while all can."""
        return self.group.lost()

    def end_streams(self) -> None:
        """End every open response of every model with a 503: the server stops."""
        self.group.end_streams(self.drain.refusal())

    def end_own_streams(self, refusal: Exception) -> None:
        """End every open response of this model."""
        for stream in list(self._streams):
            stream.fail(refusal)

    def _charger(self, budget: KeyBudget) -> Callable[[int], None]:
        if not budget.limits_tokens:
            return charge_nothing
        return lambda num_tokens: budget.charge_output(num_tokens, self.now())

    def _scheduling(
        self, headers: Mapping[str, str], options: RequestOptions, caller: Caller
    ) -> SchedulingParams:
        slo_class, slo = self._slo(options.slo_class or headers.get("x-ridgeline-slo"))
        return SchedulingParams(
            priority=_header_priority(headers) if options.priority is None else options.priority,
            tenant=caller.tenant(options.cache_salt),
            account=caller.name,
            share=caller.share,
            timeout_s=None if options.timeout_ms is None else options.timeout_ms / 1000,
            slo_class=slo_class,
            slo=slo,
        )

    def _slo(self, requested: str | None) -> tuple[str, Slo | None]:
        name = requested or self.options.default_slo_class or next(iter(self.slo_classes), None)
        if name is None:
            return "", None
        if name not in self.slo_classes:
            known = ", ".join(self.slo_classes) or "none are configured"
            raise ApiError(400, f"unknown slo_class; known: {known}", param="slo_class")
        return name, self.slo_classes[name]


async def get_service(request: Request) -> Service:
    """The service of the model that a request names, or the app's first one."""
    service: Service = request.app.state.service
    if len(service.group.services) == 1 or not isinstance(request, JsonRequest):
        return service
    body = await request.json()  # parsed once, and kept
    return service.group.find(body.get("model") if isinstance(body, dict) else None)


ServiceDep = Annotated[Service, Depends(get_service)]


def _tier_secret(engine: ServedEngine) -> bytes | None:
    """What salts blocks that outlive this process; None where none do."""
    places = (engine.info.settings.get(name) for name in ("kv_tier_dir", "kv_tier_url"))
    directory, url = (place if isinstance(place, str) else None for place in places)
    return tenant_secret(directory, url)


def _check_size(num_tokens: int, sampling: Sampling, scoring_field: str) -> None:
    """ApiError 400 for more prompt tokens or log-probabilities than one request may have."""
    check_limit("prompt", num_tokens, LIMITS.max_prompt_tokens, "prompt tokens in one request")
    if sampling.prompt_logprobs is not None:
        num_values = num_tokens * (sampling.prompt_logprobs + 1)
        what = "log-probabilities of prompt tokens in one request"
        check_limit(scoring_field, num_values, LIMITS.max_prompt_logprobs, what)


def _result_text(found: FoundAnswer | None, index: SemanticIndex | None) -> str:
    if found is None:
        return "miss"
    if found.similarity is None or index is None:
        return "hit"
    own = index.calibration
    return (
        f"semantic-hit; similarity={found.similarity:.4f}; threshold={own.threshold:.4f}; "
        f"false-hits<={own.false_hit_bound:.4f}"
    )


def _header_priority(headers: Mapping[str, str]) -> int:
    """vLLM's header; lower is served first."""
    given = headers.get("x-vllm-priority")
    if given is None:
        return 0
    digits = given.removeprefix("-")
    if not (digits.isdecimal() and len(digits) <= 3 and abs(int(digits)) <= 100):
        raise ApiError(400, "x-vllm-priority must be an integer; limit: -100..100")
    return int(given)


def _check_priority(priority: int, caller: Caller) -> None:
    if priority < caller.min_priority:
        message = f"priority is below the minimum of this API key: {priority}"
        raise ApiError(400, f"{message}; limit: {caller.min_priority}", param="priority")
