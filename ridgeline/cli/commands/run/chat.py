"""`ridgeline chat`: talk to an OpenAI-compatible server on the terminal, with the speed of every
answer. Each line of input is one message; an empty line or Ctrl-D ends it. Ctrl-C stops an answer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
from rich.console import Console

from ridgeline.cli.commands.run.generate import figures
from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.tools import ChatOptions
from ridgeline.errors import RidgelineError
from ridgeline.measure.client.http_target import authorization, base_url, no_server_error

Message = dict[str, str]


def chat(call: Invocation) -> int:
    """`ridgeline chat`."""
    return command(call.read(ChatOptions))


def command(options: ChatOptions) -> int:
    """Talk until the input ends."""
    console = Console(stderr=True, highlight=False)
    said: list[Message] = []
    if options.system:
        said.append({"role": "system", "content": options.system})
    base, headers = base_url(options.url), authorization(options.api_key)
    with httpx.Client(base_url=base, headers=headers, timeout=600) as client:
        _reach(client, options.url)
        for text in _input(console):
            said.append({"role": "user", "content": text})
            answer, line = _answer(client, options, said)
            said.append({"role": "assistant", "content": answer})
            console.print(line, style="dim", markup=False)
    return 0


def _reach(client: httpx.Client, url: str) -> None:
    """BadInput where no server answers: known before anybody has written a message. What it answers
    is no matter; not every server lists its models."""
    try:
        client.get("/v1/models", timeout=10)
    except httpx.ReadTimeout:
        return  # it is there, and busy
    except httpx.TransportError as error:
        raise no_server_error(url, error) from None


def _input(console: Console) -> Iterator[str]:
    """Messages until an empty one; the prompt shows only to people."""
    while True:
        if sys.stdin.isatty():
            console.print("> ", style="bold", end="")
        text = sys.stdin.readline().strip()
        if not text:
            return
        yield text


def _answer(client: httpx.Client, options: ChatOptions, said: list[Message]) -> tuple[str, str]:
    """Print the answer as it comes; its text, and the line of figures."""
    sent_s, token_s, text, told = time.perf_counter(), list[float](), "", ChatUsage()
    stopped = ""
    try:
        for piece in _pieces(client, options, said):
            if isinstance(piece, ChatUsage):
                told = piece
                continue
            token_s.append(time.perf_counter())
            text += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stopped = " · stopped"
    sys.stdout.write("\n")
    return text, figures(sent_s, token_s, told.num_tokens) + told.cached() + stopped


class ChatUsage(msgspec.Struct, frozen=True):
    """What the server counted; None where it does not say."""

    num_tokens: int | None = None
    num_prompt: int = 0
    num_cached: int = 0

    def cached(self) -> str:
        if not self.num_cached:
            return ""
        return f" · {self.num_cached:,} of {self.num_prompt:,} prompt tokens cached"


def _pieces(
    client: httpx.Client, options: ChatOptions, said: list[Message]
) -> Iterator[str | ChatUsage]:
    """The answer's chunks, one per token on most servers, and its usage; RidgelineError where there
    is none."""
    body = {
        "messages": said,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
        **({"model": options.served_model_name} if options.served_model_name else {}),
    }
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                raise RidgelineError(_why(reply.read(), reply.status_code))
            for line in reply.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk = json.loads(line[6:])
                    yield from _text(chunk)
                    if chunk.get("usage"):
                        yield _usage(chunk["usage"])
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise no_server_error(options.url, error) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RidgelineError(f"{options.url} does not answer: {error}") from None


def _text(chunk: dict[str, object]) -> Iterator[str]:
    if "error" in chunk:
        raise RidgelineError(_why(json.dumps(chunk).encode(), 500))
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        delta = choice.get("delta", {})
        content = delta.get("content")
        # Nothing beside a role opens an answer; some servers give the role with every piece.
        if content or (content is not None and "role" not in delta):
            yield content


def _usage(told: dict[str, Any]) -> ChatUsage:
    details = told.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    return ChatUsage(told.get("completion_tokens"), told.get("prompt_tokens") or 0, cached)


def _why(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server said {status}"
