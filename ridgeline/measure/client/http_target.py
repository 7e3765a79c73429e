"""Any OpenAI-compatible server as a load target: /v1/completions and /v1/chat/completions.

Conversations go to the chat endpoint, text and token ids to the completions endpoint, so that one
workload may mix both. The final usage chunk decides how many tokens there were. A stream is
complete once a finish_reason or [DONE] has arrived; one that just stops is a failure, and keeps the
tokens received so far.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput
from ridgeline.measure.client.accepted_prompts import (
    CHAT,
    COMMON_WORDS,
    COMPLETIONS,
    FORBIDDEN,
    UNAUTHORISED,
    AcceptedPrompts,
    CountTokens,
    PromptForm,
    Vocabulary,
    find_accepted_prompts,
)
from ridgeline.measure.client.http_connection import (
    OK,
    Connect,
    HttpConnectionError,
    HttpConnectionPool,
    HttpReply,
    Origin,
    connect,
)
from ridgeline.measure.client.sse_parser import ServerEvent, SseParser
from ridgeline.measure.client.stream_chunks import (
    Chunk,
    ChunkUsage,
    OutputChunk,
    count_tokens,
    decode_chunk,
    error_message,
    is_failure,
    output_of,
)
from ridgeline.measure.client.target import Now, Recorder
from ridgeline.measure.workload.base import ChatPrompt, LoadRequest, Prompt, plain_chat
from ridgeline.records import EngineInfo, StepStat

Endpoint = Literal["auto", "chat", "completions"]
MAX_ERROR_CHARS = 300
QUEUE_TIME_HEADERS = ("x-queue-time", "x-validation-time")


class HttpTarget:
    """One model of a server. The load client limits the time of requests, the target of connecting.

    `vocabulary` counts the tokens of answers for which the server does not, and writes token ids as
    text for a server that takes none, as `negotiate` finds out. The caller sets `info` if it knows
    the configuration of the server.
    """

    info: EngineInfo | None = None
    accepted = AcceptedPrompts()

    def __init__(
        self,
        url: str,
        model: str,
        *,
        endpoint: Endpoint = "auto",
        api_key: str | None = None,
        vocabulary: Vocabulary = COMMON_WORDS,
        stream: bool = True,
        connect: Connect = connect,
    ) -> None:
        self._url, self._model, self._endpoint = base_url(url), model, endpoint
        self._stream = stream
        self._vocabulary = vocabulary
        self._pool, self._prefix = connection_pool(self._url, api_key, connect)

    @property
    def name(self) -> str:
        twin = "" if self.info is None or not self.info.twin else f"; a twin: {self.info.twin}"
        return f"{self._url} ({self._model}{twin})"

    async def negotiate(self, forms: Sequence[PromptForm]) -> AcceptedPrompts:
        """Find out, and remember, which of these forms of a prompt the server takes.

        Raises BadInput if it takes none, does not answer, or refuses the key.
        """
        self.accepted = await find_accepted_prompts(
            self._pool, self._prefix, self._model, forms, stream=self._stream
        )
        return self.accepted

    async def send(self, request: LoadRequest, record: Recorder) -> None:
        path, body = self._request(request)
        reader = (_StreamReader if self._stream else _WholeResponseReader)(
            record, self._vocabulary.count_tokens, request.prompt
        )
        try:
            reply = await self._pool.post(
                self._prefix + path, msgspec.json.encode(body), reader.feed
            )
            if reply.status != OK:
                record.record_failure(_error_text(reply))
            else:
                reader.conclude(reply.headers)
        except HttpConnectionError as error:
            record.record_failure(str(error))
        finally:
            reader.write_chunks()  # also those before a timeout or a broken connection

    def drain_steps(self, now: Now) -> tuple[StepStat, ...]:
        return ()

    async def close(self) -> None:
        self._pool.close()

    def _request(self, request: LoadRequest) -> tuple[str, dict[str, object]]:
        body: dict[str, object] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
        }
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if request.ignore_eos:
            body["ignore_eos"] = True
        prompt, endpoint = request.prompt, self._endpoint
        if self.accepted.form != "tokens" and isinstance(prompt, tuple):
            prompt = self._vocabulary.decode(prompt)
        if self.accepted.form == "chat":
            endpoint = "chat"
        path, fields = _endpoint_and_fields(prompt, endpoint)
        return path, self.accepted.adapt(body | fields)


HOST_AND_PORT = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d+(?:/.*)?")


def base_url(url: str) -> str:
    """The server's root, without trailing slash and /v1; HOST:PORT means http://HOST:PORT.

    Raises BadInput if it is no HTTP address.
    """
    url = f"http://{url}" if HOST_AND_PORT.fullmatch(url) else url
    try:
        parsed = urlsplit(url)
        _ = parsed.port
    except ValueError as error:
        raise BadInput(
            "the address is not a URL", value=url, fix=f"write http://HOST:PORT ({error})"
        ) from None
    host = parsed.hostname or ""
    if parsed.scheme not in ("http", "https") or not host or " " in host:
        raise BadInput("the address is not HTTP", value=url, fix="write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def no_server_error(url: str, why: object) -> BadInput:
    """The error for an address at which no server answers."""
    return BadInput(
        "no server answers", value=url, fix=f"start the server or correct the URL ({why})"
    )


def key_refused(url: str, status: int, api_key: str | None) -> BadInput:
    """The error for a server that wants a key, or another one."""
    return BadInput(
        "the server refuses the API key" if api_key else "the server requires an API key",
        value=f"{url}: HTTP {status}",
        fix="give its key with --api-key or RIDGELINE_API_KEY",
    )


async def first_model(url: str, *, api_key: str | None = None, connect: Connect = connect) -> str:
    """The first model that a server lists. Raises BadInput if no server answers."""
    pool, prefix = connection_pool(base_url(url), api_key, connect)
    try:
        reply = await pool.get(f"{prefix}/v1/models")
        if reply.status in (UNAUTHORISED, FORBIDDEN):
            raise key_refused(base_url(url), reply.status, api_key)
        if reply.status != OK:
            raise LookupError(f"HTTP {reply.status}")
        return str(msgspec.json.decode(reply.body, type=dict[str, Any])["data"][0]["id"])
    except (HttpConnectionError, LookupError, TypeError, *DECODE_ERRORS) as error:
        raise BadInput(
            "no OpenAI-compatible server answers /v1/models",
            value=base_url(url),
            fix=f"start the server or correct the URL ({_reason(error)})",
        ) from None
    finally:
        pool.close()


def _reason(error: Exception) -> str:
    """A connection error has its own words; others need the name of their kind."""
    text = str(error)
    return text if isinstance(error, HttpConnectionError) else f"{type(error).__name__}: {text}"


def connection_pool(
    url: str, api_key: str | None, connect: Connect = connect
) -> tuple[HttpConnectionPool, str]:
    """A connection pool to a server, and the path of the server's root."""
    parsed = urlsplit(base_url(url))
    tls = parsed.scheme == "https"
    origin = Origin(parsed.hostname or "", parsed.port or (443 if tls else 80), tls)
    return HttpConnectionPool(origin, authorization(api_key), connect), parsed.path


def authorization(api_key: str | None) -> dict[str, str]:
    """The authorization header of a key; {} without a key.

    Raises BadInput if the key cannot be sent in a header.
    """
    if not api_key:
        return {}
    if not api_key.isascii() or not api_key.isprintable():
        raise BadInput(
            "the API key contains characters that an HTTP header cannot hold",
            limit="printable ASCII",
            fix="copy the key again",
        )
    return {"Authorization": f"Bearer {api_key}"}


def _endpoint_and_fields(prompt: Prompt, endpoint: Endpoint) -> tuple[str, dict[str, object]]:
    if isinstance(prompt, ChatPrompt) and endpoint != "completions":
        return CHAT, {"messages": msgspec.to_builtins(prompt.messages)}
    if isinstance(prompt, ChatPrompt):
        return COMPLETIONS, {"prompt": plain_chat(prompt)}
    if endpoint != "chat":
        return COMPLETIONS, {"prompt": prompt}
    if isinstance(prompt, str):
        return CHAT, {"messages": [{"role": "user", "content": prompt}]}
    raise BadInput(
        "the chat endpoint does not accept token ids",
        value=f"{len(prompt)} ids",
        fix="use the completions endpoint",
    )


def _error_text(reply: HttpReply) -> str:
    body = reply.body.decode("utf-8", "replace").strip()
    return f"HTTP {reply.status}: {body[:MAX_ERROR_CHARS]}".rstrip(": ")


class _StreamReader:
    """Reads one stream; `write_chunks` records its chunks at the end."""

    def __init__(
        self, record: Recorder, count_tokens: CountTokens | None, prompt: Prompt = ""
    ) -> None:
        self._record, self._count_tokens, self._prompt = record, count_tokens, prompt
        self._parser = SseParser()
        self._outputs: list[OutputChunk] = []
        self._running_total = 0
        self._usage: ChunkUsage | None = None
        self._prefill_s: float | None = None
        self._sent_s = record.now()
        self._queue_time_s: float | None = None
        self._reason: str | None = None
        self._done = False

    def feed(self, received: bytes) -> None:
        """Process one read of the socket, in the event-loop iteration in which it arrived."""
        for event in self._parser.feed(received):
            self.take_event(event)

    def take_event(self, event: ServerEvent) -> None:
        if event.data == b"[DONE]":
            self._done = True
            return
        try:
            chunk = decode_chunk(event.data)
        except DECODE_ERRORS as error:
            self._record.record_failure(f"the server sent a malformed chunk: {error}")
            return
        failure = error_message(chunk)
        if failure is not None or event.kind == "error":
            self._record.record_failure(
                failure or event.data.decode("utf-8", "replace")[:MAX_ERROR_CHARS]
            )
            return
        self._take_chunk(chunk)

    def _take_chunk(self, chunk: Chunk) -> None:
        now_s = self._record.now()
        for choice in chunk.choices or ():
            output = output_of(choice, now_s)
            if output is not None:
                self._outputs.append(self._count_by_growth(output, chunk.usage))
            self._reason = choice.finish_reason or self._reason
            if is_failure(choice.finish_reason):
                self._record.record_failure(f"the server ended with {choice.finish_reason!r}")
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.metrics is not None or chunk.timings is not None:
            self._prefill_s = chunk.prefill_s

    def _count_by_growth(self, output: OutputChunk, usage: ChunkUsage | None) -> OutputChunk:
        """The growth of a running count is the number of tokens of this chunk."""
        total = usage.completion_tokens if usage is not None else None
        if not total:
            return output
        grown, self._running_total = total - self._running_total, total
        if output.count is not None or grown < 1:
            return output
        return msgspec.structs.replace(output, count=grown, doubtful=False)

    def conclude(self, headers: Mapping[str, str]) -> None:
        """Record the end of the stream: a failure if it was incomplete."""
        self._queue_time_s = queue_time_s(headers)
        for event in self._parser.close():
            self.take_event(event)
        usage, record = self._usage, self._record
        if not (self._done or self._reason):
            record.record_failure("the stream ended before its finish_reason")
        if record.has_ended:
            return
        record.record_finish(
            self._reason,
            prompt_tokens=usage.prompt_tokens if usage is not None else self._count_prompt(),
            output_tokens=self._total,
            cached_tokens=usage.cached_tokens if usage is not None else 0,
        )

    def write_chunks(self) -> None:
        """Record the chunks, now that the server's final count (if any) is known."""
        total = self._total
        text = "".join(output.text for output in self._outputs)
        if total is None:
            total = self._count_locally(text)
        for at_s, count in count_tokens(self._outputs, total):
            self._record.record_chunk("", count, at_s=at_s)
        self._record.append_text(text)
        if any(output.reasoning for output in self._outputs):
            answer = (o.at_s for o in self._outputs if o.text and not o.reasoning)
            self._record.record_reasoning(next(answer, None))
        started_s = self._started_s()
        if started_s is not None and self._outputs:
            self._record.record_start(started_s)

    def _started_s(self) -> float | None:
        """When the server first ran the request, as it reports; None if it does not."""
        if self._prefill_s is not None and self._outputs:
            return self._outputs[0].at_s - self._prefill_s
        return None if self._queue_time_s is None else self._sent_s + self._queue_time_s

    def _count_locally(self, text: str) -> int | None:
        """Tokens of a complete answer by `count_tokens`; None leaves one token per chunk."""
        complete = bool(self._done or self._reason)
        if not (complete and self._outputs) or self._count_tokens is None:
            self._record.counted_by = "chunks"
            return None
        self._record.counted_by = "tokenizer"
        return self._count_tokens(text)

    def _count_prompt(self) -> int:
        """Prompt tokens where the server counts none; 0 if they are unknown."""
        prompt = self._prompt
        if isinstance(prompt, tuple):
            return len(prompt)
        if self._count_tokens is None:
            return 0
        return self._count_tokens(plain_chat(prompt) if isinstance(prompt, ChatPrompt) else prompt)

    @property
    def _total(self) -> int | None:
        """The server's count of output tokens; none where it counts 0 although text came."""
        total = self._usage.completion_tokens if self._usage is not None else None
        return total or (None if any(output.text for output in self._outputs) else total)


class _WholeResponseReader(_StreamReader):
    """Reads an answer that is not streamed: all of its tokens arrive at its end."""

    def __init__(
        self, record: Recorder, count_tokens: CountTokens | None, prompt: Prompt = ""
    ) -> None:
        super().__init__(record, count_tokens, prompt)
        self._body: list[bytes] = []

    def feed(self, received: bytes) -> None:
        self._body.append(received)

    def conclude(self, headers: Mapping[str, str]) -> None:
        self.take_event(ServerEvent(data=b"".join(self._body)))
        super().conclude(headers)

    def _started_s(self) -> float | None:
        """Without the time of the first token, a prefill time does not give the start."""
        return None if self._queue_time_s is None else self._sent_s + self._queue_time_s


def queue_time_s(headers: Mapping[str, str]) -> float | None:
    """Seconds from a request's arrival until it ran, from the headers of its answer.

    None if absent.

    TGI and its descendants send them with answers that are not streamed.
    """
    queue, validation = (_ms(headers.get(name, "")) for name in QUEUE_TIME_HEADERS)
    return None if queue is None else (queue + (validation or 0.0)) / 1000


def _ms(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None
