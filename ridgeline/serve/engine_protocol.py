"""What the server needs of an engine, in words a fake can keep.

`ridgeline.engine.engine.Engine` has this shape; the tests hand in a scripted one. Invariants:

- `listen` hands the events of one request to `sink` in order, on the running loop, those of one step in
  one call; every choice ends in exactly one `Finished`, unless a `Failed` ends the whole ask. It
  returns how to leave: then nothing more is heard, and what has not ended is aborted. A `UserError`
  (prompt too long, a grammar that cannot be compiled, …) or `EngineFull` is raised instead.
- `abort` may be called at any time, from the event loop, for a request that is unknown or has ended.
- `counters` only ever grow where they count; `healthy` is True while the engine makes progress.
- None of these blocks the event loop for longer than a lock's hand-over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from ridgeline.records import EngineInfo, Event, Sampling

Sink = Callable[[Sequence[Event]], None]


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def bytes_of(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """What one token adds to a text, which may be a part of a character."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of the conversation; UserError where the model directory has no template."""
        ...


class ServedEngine(Protocol):
    """The engine as the server sees it."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    async def listen(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        sink: Sink,
        *,
        timeout_s: float | None = None,
        **terms: Any,
    ) -> Callable[[], None]:
        """`terms`: request_id, priority, tenant, slo, background, as `Engine.listen` has them, and
        `errand` where there is one."""
        ...

    def embed(
        self, tokens: Sequence[int], pooling: Literal["mean", "last"]
    ) -> Future[Sequence[float]]:
        """The last layer's states of a text, pooled: one number per dimension."""
        ...

    def abort(self, request_id: str) -> None: ...

    def counters(self) -> Mapping[str, float]: ...

    def is_healthy(self) -> bool: ...
