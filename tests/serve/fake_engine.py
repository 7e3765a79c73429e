"""A scripted engine, so that tests of the server test nothing else.

Its tokenizer has one token per character (id = code point). The output is a fixed text;
a prompt may contain a command: `!slow`, `!fail`, `!crash`, `!stuck`, `!hang` (after two tokens),
`!gone` (aborted).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from ridgeline.engine.tokenization.chat import Chat, JinjaTemplate
from ridgeline.errors import BadInput
from ridgeline.records import (
    CachePolicy,
    EngineInfo,
    Event,
    Failed,
    Finished,
    FinishReason,
    Sampling,
    Slo,
    Started,
    Token,
    TokenLogprobs,
    Usage,
)

ANSWER = "Hello, wörld! This is a longer answer."
MAX_MODEL_LEN = 256


class CharTokenizer:
    """One token per character; the template writes `<role>content`, and `<assistant>` last."""

    max_token_chars = 16

    def __init__(self, *, has_template: bool = True) -> None:
        self._has_template = has_template
        self.variables: dict[str, Any] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(_character, tokens))

    def bytes_of(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        return _character(token).encode("utf-8")

    def special_token_id(self, text: str) -> int | None:
        return None

    template_uses_tools = True
    template_uses_calls = True
    template_uses_documents = False

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        parse_special: bool = True,
    ) -> list[int]:
        if not self._has_template:
            raise BadInput("the model has no chat template", fix="use /v1/completions")
        self.variables = dict(variables or {})
        chat = Chat(messages, add_generation_prompt, tools, self.variables, continue_final_message)
        return self.encode(_TEMPLATE.render(chat))


_TEMPLATE = JinjaTemplate(
    {
        "default": "{% for tool in tools or [] %}<tool>{{ tool.function.name }}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    },
    {},
)


def _character(token: int) -> str:
    """A token that is no character decodes to the replacement character, as in real tokenizers."""
    return chr(token) if token < 0xD800 or 0xE000 <= token < 0x110000 else "\ufffd"


class FakeEngine:
    """Implements `ridgeline.serve.engine_protocol.ServedEngine`."""

    def __init__(self, *, has_template: bool = True) -> None:
        self.tokenizer = CharTokenizer(has_template=has_template)
        self.info = EngineInfo(
            model="fake",
            settings={"enable_prefix_caching": True},
            derivations={},
            max_model_len=MAX_MODEL_LEN,
            num_blocks=10,
            block_size=16,
            weight_bytes=1,
            kv_bytes_per_token=1,
            device="cpu",
            compute_dtype="float32",
        )
        self.alive = True
        self.cause_of_death: str | None = None
        self.requests: dict[str, tuple[tuple[int, ...], Sampling, int, str]] = {}
        self.terms: dict[str, tuple[float | None, Slo | None]] = {}
        self.in_background: set[str] = set()
        self.aborted: list[str] = []
        self.pinned: list[tuple[tuple[int, ...], CachePolicy, str, str]] = []
        self.embedded: list[tuple[int, ...]] = []
        self._pumps: dict[asyncio.Task[None], None] = {}  # of unfinished requests
        self.ended: list[str] = []
        self.numbers = {"num_requests_running": 1.0, "prefix_cache_hits": 7.0}

    def counters(self) -> Mapping[str, float]:
        return self.numbers

    def is_healthy(self) -> bool:
        return self.alive

    @property
    def death(self) -> str | None:
        return self.cause_of_death

    def embed(
        self, tokens: Sequence[int], pooling: Literal["mean", "last"], account: str = ""
    ) -> Future[Sequence[float]]:
        self.embedded.append(tuple(tokens))
        stuck: Future[Sequence[float]] = Future()
        is_stuck = "!stuck" in "".join(map(_character, tokens))
        return stuck if is_stuck else pooled(tokens, pooling)

    def forget_prefix(
        self, tokens: Sequence[int], tenant: str = "", account: str = ""
    ) -> Future[int]:
        dropped: Future[int] = Future()
        dropped.set_result(len(tokens))
        return dropped

    def pin_prefix(
        self, tokens: Sequence[int], policy: CachePolicy, tenant: str = "", account: str = ""
    ) -> Future[int]:
        self.pinned.append((tuple(tokens), policy, tenant, account))
        pinned: Future[int] = Future()
        pinned.set_result(policy.pin_tokens)
        return pinned

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | None = None,
        slo: Slo | None = None,
        background: bool = False,
        account: str = "",
        share: float = 1.0,
        prediction: tuple[int, ...] = (),
        cache: CachePolicy | None = None,
    ) -> AsyncGenerator[Event, None]:
        assert request_id is not None and not isinstance(prompt, str)
        tokens = tuple(prompt)
        if len(tokens) >= MAX_MODEL_LEN:
            raise BadInput("the prompt is too long", value=len(tokens), limit=MAX_MODEL_LEN - 1)
        if background:
            self.in_background.add(request_id)
        self.requests[request_id] = (tokens, sampling, priority, tenant)
        self.terms[request_id] = (timeout_s, slo)
        async for event in self._script(tokens, sampling, request_id):
            yield event
        self.ended.append(request_id)

    async def listen(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        sink: Callable[[Sequence[Event]], None],
        **terms: Any,
    ) -> Callable[[], None]:
        events = self.stream(prompt, sampling, **terms)
        first = await anext(events)

        async def pump() -> None:
            step = [first]  # as in the engine, an end comes with its last token
            async for event in events:
                if not isinstance(event, Finished):
                    sink(step)
                    step = []
                step.append(event)
            sink(step)
            del self._pumps[task]

        task = asyncio.create_task(pump())
        self._pumps[task] = None

        def unsubscribe() -> None:
            if self._pumps.pop(task, task) is None:
                task.cancel()
                self.abort(terms["request_id"])

        return unsubscribe

    async def _script(
        self, tokens: tuple[int, ...], sampling: Sampling, request_id: str
    ) -> AsyncIterator[Event]:
        command = "".join(map(_character, tokens))
        if "!crash" in command:
            raise RuntimeError("bug at /srv/app/secret.py 0x7fffdeadbeef")
        yield Started(request_id=request_id, at_s=0.0, cached_tokens=3)
        if "!stuck" in command:
            await asyncio.sleep(3600)
        length = min(sampling.max_tokens or MAX_MODEL_LEN, len(ANSWER))
        for position in range(length):
            if "!fail" in command and position == 2:
                yield Failed(
                    request_id=request_id, at_s=0.0, error="lost /var/lib/model/x at 0x7fffdeadbeef"
                )
                return
            if "!hang" in command and position == 2:
                await asyncio.sleep(3600)
            for index in range(sampling.n):
                yield _token(request_id, index, position, tokens, sampling)
            await asyncio.sleep(0.02 if "!slow" in command else 0)
        reason: FinishReason = "stop" if length == len(ANSWER) else "length"
        if "!gone" in command:
            reason = "abort"
        usage = Usage(prompt_tokens=len(tokens), cached_tokens=3, completion_tokens=length)
        for index in range(sampling.n):
            yield Finished(request_id=request_id, index=index, reason=reason, at_s=0.0, usage=usage)


def _token(
    request_id: str, index: int, position: int, prompt: tuple[int, ...], sampling: Sampling
) -> Token:
    token = ord(ANSWER[position])
    top = ((token, -0.5), (ord("?"), -math.inf))
    logprobs = prompt_logprobs = None
    if sampling.logprobs is not None:
        logprobs = TokenLogprobs(token, -0.5, 1, top[: sampling.logprobs])
    if sampling.prompt_logprobs is not None and position == 0:
        logprobs_ = (
            TokenLogprobs(known, -1.0, 2, top[: sampling.prompt_logprobs]) for known in prompt[1:]
        )
        prompt_logprobs = (None, *logprobs_)
    return Token(
        request_id=request_id,
        index=index,
        token=token,
        text=chr(token),
        at_s=0.0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def pooled(tokens: Sequence[int], pooling: str) -> Future[Sequence[float]]:
    """Two numbers: the last or the mean token id, and 1."""
    future: Future[Sequence[float]] = Future()
    value = tokens[-1] if pooling == "last" else sum(tokens) / len(tokens)
    future.set_result([float(value), 1.0])
    return future
