"""A conversation with a model on an OpenAI-compatible server: it remembers its turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from ridgeline.errors import DECODE_ERRORS, BadInput, RidgelineError
from ridgeline.measure.client.http_target import authorization, base_url, no_server_error
from ridgeline.measure.client.sse_parser import SseParser
from ridgeline.measure.client.stream_chunks import (
    Chunk,
    ChunkUsage,
    decode_chunk,
    error_message,
    output_of,
)
from ridgeline.records import FinishReason, Usage
from ridgeline.workflows.text.transcript import Reply, Transcript, Turn

_CUT_OFF: dict[str, FinishReason] = {"length": "length", "abort": "abort"}
_TIMEOUT_S = 600


class RemoteConversation:
    """A conversation over the server at `url`. `model`: the name to request, None for its default.

    A message is answered with at most `max_tokens`. Without a `temperature` or `top_p`, the
    server's own defaults hold.

    Raises BadInput where no server answers.
    """

    def __init__(
        self,
        url: str,
        *,
        max_tokens: int,
        temperature: float | None = None,
        top_p: float | None = None,
        model: str | None = None,
        api_key: str | None = None,
        system: str | None = None,
    ) -> None:
        self.url, self.model = url, model
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self._turns = [] if system is None else [Turn("system", system)]
        self._replies: list[Reply] = []
        self._client = httpx.Client(
            base_url=base_url(url), headers=authorization(api_key), timeout=_TIMEOUT_S
        )
        self._check_reachable()

    def _check_reachable(self) -> None:
        """BadInput where no server answers. What it answers does not matter: not every one lists
        its models."""
        try:
            self._client.get("/v1/models", timeout=10)
        except httpx.ReadTimeout:
            return  # it is there, and busy
        except httpx.TransportError as error:
            raise no_server_error(self.url, error) from None

    @property
    def transcript(self) -> Transcript:
        """A record of the conversation so far."""
        return Transcript(
            model=self.model or self.url, turns=tuple(self._turns), replies=tuple(self._replies)
        )

    def stream(self, text: str) -> RemoteReplyStream:
        """Send a message; the reply is streamed. What came of a stopped reply is remembered.

        Reading the stream raises BadInput if no server answers, RidgelineError if it refuses.
        """
        if not text:
            raise BadInput("the message is empty", fix="send at least one character")
        turns = [*self._turns, Turn("user", text)]
        body = {
            "messages": [{"role": turn.role, "content": turn.content} for turn in turns],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
            **({"model": self.model} if self.model else {}),
        }
        return RemoteReplyStream(self, body, turns)

    def remember(self, turns: list[Turn], reply: Reply) -> None:
        """Keep the user's message and the reply to it, unless nothing came."""
        if reply.text or reply.finish_reason == "stop":
            self._turns = [*turns, Turn("assistant", reply.text)]
            self._replies.append(reply)

    def reset(self) -> None:
        """Forget every turn but the system prompt."""
        self._turns = [turn for turn in self._turns if turn.role == "system"]
        self._replies = []

    def save(self, path: str | Path) -> Path:
        """Write the transcript as .json or .html, by the suffix of `path`, and return the path."""
        return self.transcript.save(path)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def post(self, body: dict[str, Any]) -> Iterator[Chunk]:
        """The chunks of a streamed chat completion. Raises RidgelineError if it breaks off."""
        parser = SseParser()
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise RidgelineError(_reason(answer.read(), answer.status_code))
                for received in answer.iter_bytes():
                    for event in parser.feed(received):
                        if event.data == b"[DONE]":
                            return
                        yield self._chunk(event.data)
                for event in parser.close():
                    yield self._chunk(event.data)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise no_server_error(self.url, error) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RidgelineError(f"{self.url} does not answer: {error}") from None

    def _chunk(self, data: bytes) -> Chunk:
        try:
            chunk = decode_chunk(data)
        except DECODE_ERRORS as error:
            raise RidgelineError(f"{self.url} sent a chunk that is malformed: {error}") from None
        if (problem := error_message(chunk)) is not None:
            raise RidgelineError(problem)
        return chunk


class RemoteReplyStream:
    """The pieces of one reply. Leaving the `with` block stops a reply that is incomplete."""

    def __init__(
        self, conversation: RemoteConversation, body: dict[str, Any], turns: list[Turn]
    ) -> None:
        self._conversation, self._body, self._turns = conversation, body, turns
        self._pieces: list[str] = []
        self._reason: FinishReason | None = None
        self._usage = ChunkUsage()
        self._sent_s = self._first_s = self._last_s = 0.0

    @property
    def reply(self) -> Reply:
        """The answer so far; where the server counts no tokens, its chunks are counted."""
        return Reply(
            text="".join(self._pieces),
            finish_reason=self._reason,
            usage=Usage(
                prompt_tokens=self._usage.prompt_tokens,
                cached_tokens=self._usage.cached_tokens,
                completion_tokens=self._usage.completion_tokens or len(self._pieces),
            ),
            ttft_s=self._first_s - self._sent_s if self._first_s else None,
            decode_s=self._last_s - self._first_s,
        )

    def __iter__(self) -> Iterator[str]:
        self._sent_s = perf_counter()
        for chunk in self._conversation.post(self._body):
            self._usage = chunk.usage or self._usage
            for choice in chunk.choices or ():
                if choice.finish_reason is not None:
                    self._reason = _finish_reason(choice.finish_reason)
                output = output_of(choice, perf_counter())
                if output is None or output.doubtful:
                    continue
                self._last_s = output.at_s
                self._first_s = self._first_s or self._last_s
                # Reasoning counts as output, but belongs neither to the reply nor to the next
                # prompt.
                content = choice.delta.content if choice.delta is not None else None
                if content is not None:
                    self._pieces.append(content)
                    yield content
        # Some servers send no finish_reason. An answer that breaks off is an error of the
        # connection.
        self._reason = self._reason or "stop"

    def __enter__(self) -> RemoteReplyStream:
        return self

    def __exit__(self, *error: object) -> None:
        self._reason = self._reason or "abort"
        self._conversation.remember(self._turns, self.reply)


def _finish_reason(stated: str) -> FinishReason:
    if stated == "error":
        raise RidgelineError("the server ended the answer with an error")
    return _CUT_OFF.get(stated, "stop")


def _reason(body: bytes, status: int) -> str:
    """What the server says is wrong."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (KeyError, TypeError, *DECODE_ERRORS):
        return f"the server answered with status {status}"
