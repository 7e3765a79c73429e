"""What the server needs of an engine. `ridgeline.engine.engine.Engine` has this shape, and so have
the scripted engines of the tests.

Invariants
- `listen` passes the events of one request to `sink` in order, on the running event loop, all
  events of a step in one call. Every choice ends in exactly one `Finished`, unless a `Failed` ends
  the whole request. It returns a function that unsubscribes, and aborts what has not ended. It
  raises `UserError` (the prompt is too long, a grammar cannot be compiled, …) or `EngineFull`
  instead.
- `abort` may be called at any time, also for a request that is unknown or has ended.
- `counters` are monotonic where they count; `is_healthy` while the engine makes progress.
- No call blocks the event loop for longer than it takes to acquire a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from ridgeline.records import CachePolicy, EngineInfo, Event, Sampling

EventSink = Callable[[Sequence[Event]], None]


class ServedTokenizer(Protocol):
    """Text to token ids and back. `encode` of a long text releases the GIL while it works."""

    @property
    def max_token_chars(self) -> int:
        """Characters of text that one token stands for at most."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def bytes_of(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that a token adds to a text, which may be a part of a character."""
        ...

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that is written `text`; None if there is none."""
        ...

    @property
    def template_uses_tools(self) -> bool:
        """Whether the chat template mentions the tools of a request."""
        ...

    @property
    def template_uses_calls(self) -> bool:
        """Whether the chat template mentions the tool calls of a conversation."""
        ...

    @property
    def template_uses_documents(self) -> bool:
        """Whether the chat template mentions the documents of a request."""
        ...

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
        """Token ids of the conversation; UserError if the model directory has no template.

        Without `parse_special`, special tokens in the texts of users, tools and documents are text.
        """
        ...


class ServedEngine(Protocol):
    """One loaded model."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> ServedTokenizer: ...

    async def listen(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        sink: EventSink,
        *,
        timeout_s: float | None = None,
        **terms: Any,
    ) -> Callable[[], None]:
        """Submit a request. `terms`: request_id, priority, tenant, slo, background, as of
        `Engine.listen`."""
        ...

    def embed(
        self, tokens: Sequence[int], pooling: Literal["mean", "last"], account: str = ""
    ) -> Future[Sequence[float]]:
        """Hidden states of the last layer, pooled over the text: one number per dimension."""
        ...

    def forget_prefix(
        self, tokens: Sequence[int], tenant: str = "", account: str = ""
    ) -> Future[int]:
        """Drop what is cached of a prompt; the number of tokens."""
        ...

    def pin_prefix(
        self, tokens: Sequence[int], policy: CachePolicy, tenant: str = "", account: str = ""
    ) -> Future[int]:
        """Pin the beginning of a prompt without computing it; the number of tokens."""
        ...

    def abort(self, request_id: str) -> None: ...

    def counters(self) -> Mapping[str, float]: ...

    def is_healthy(self) -> bool: ...

    @property
    def death(self) -> str | None:
        """Why the engine has stopped by itself, for good; None if it has not."""
        ...
