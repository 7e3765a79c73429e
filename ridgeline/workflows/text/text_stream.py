"""One answer as it is generated, for `for` and for `async for`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from time import perf_counter

from ridgeline.engine.engine import Engine, Prompt
from ridgeline.errors import BadInput, EngineUnavailable
from ridgeline.records import Event, Failed, Finished, FinishReason, Sampling, Started, Token, Usage
from ridgeline.workflows.text.transcript import Reply

ChatMessages = Sequence[Mapping[str, object]]
"""A conversation: `{"role": "user", "content": "…"}` and so on, as in OpenAI's API."""


def prompt_tokens(engine: Engine, prompt: Prompt | ChatMessages) -> Sequence[int]:
    """Token ids of a text, of a conversation (by the model's chat template), or as given.

    Raises BadInput if the model has no tokenizer or no chat template.
    """
    if isinstance(prompt, str):
        return engine.tokenizer.encode(prompt)
    tokens = [item for item in prompt if isinstance(item, int)]
    messages = [item for item in prompt if isinstance(item, Mapping)]
    if len(tokens) == len(prompt):
        return tokens
    if len(messages) != len(prompt):
        raise BadInput(
            "a prompt is a text, a list of token ids, or a list of chat messages",
            value=type(next(i for i in prompt if not isinstance(i, int | Mapping))).__name__,
            fix='write messages as {"role": "user", "content": "…"}',
        )
    return engine.tokenizer.apply_chat_template(messages)


class TextStream:
    """The pieces of one answer: read it once, with `for` or `async for`.

    Leaving the `with` (or `async with`) block, or `close`, aborts an answer that is incomplete and
    frees its KV blocks; so does the cancellation of the task that reads it. `engine` is an open
    engine, or opens one that the stream closes when it ends. Iterating raises BadInput, CannotRun,
    DoesNotFit or EngineUnavailable. `on_end` gets the reply when the stream ends, for whatever
    reason, once it has begun.
    """

    def __init__(
        self,
        engine: Engine | Callable[[], Engine],
        prompt: Prompt | ChatMessages,
        sampling: Sampling,
        *,
        on_end: Callable[[Reply], None] = lambda reply: None,
    ) -> None:
        if sampling.n != 1:
            raise BadInput("a stream has one answer", value=sampling.n, limit="n=1", fix="set n=1")
        self._engine, self._prompt, self._sampling = engine, prompt, sampling
        self._on_end = on_end
        self._received = _Received()
        self._pieces: Generator[str, None, None] | None = None
        self._async_pieces: AsyncGenerator[str, None] | None = None

    @property
    def reply(self) -> Reply:
        """What has been received so far."""
        return self._received.reply()

    @property
    def is_open(self) -> bool:
        """Whether the answer has begun and not ended."""
        return self._received.is_open

    def close(self) -> None:
        """End the stream; an incomplete answer is aborted."""
        if self._pieces is not None:
            self._pieces.close()

    async def aclose(self) -> None:
        """End the stream; an incomplete answer is aborted."""
        if self._async_pieces is not None:
            await self._async_pieces.aclose()

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        self._check_reader(self._async_pieces, "for", "async for")
        if self._pieces is None:
            self._pieces = self._read()
        return next(self._pieces)

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> str:
        self._check_reader(self._pieces, "async for", "for")
        if self._async_pieces is None:
            self._async_pieces = self._read_async()
        return await anext(self._async_pieces)

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> TextStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def _check_reader(self, other: object, this: str, begun: str) -> None:
        if other is not None:
            raise BadInput(
                "a stream is read in one way", value=this, limit=begun, fix=f"go on with `{begun}`"
            )

    def _read(self) -> Generator[str, None, None]:
        owned = None if isinstance(self._engine, Engine) else self._engine()
        engine = owned or self._engine
        assert isinstance(engine, Engine)
        try:
            prompt = self._begin(engine)
            with closing(engine.iterate(prompt, self._sampling)) as events:
                for event in events:
                    if piece := self._received.take(event):
                        yield piece
        finally:
            self._end(owned)

    async def _read_async(self) -> AsyncGenerator[str, None]:
        owned = None if isinstance(self._engine, Engine) else await _open(self._engine)
        engine = owned or self._engine
        assert isinstance(engine, Engine)
        try:
            prompt = self._begin(engine)
            async with aclosing(engine.stream(prompt, self._sampling)) as events:
                async for event in events:
                    if piece := self._received.take(event):
                        yield piece
        finally:
            self._end(owned)

    def _begin(self, engine: Engine) -> Sequence[int]:
        prompt = prompt_tokens(engine, self._prompt)
        self._received.begin(len(prompt))
        return prompt

    def _end(self, owned: Engine | None) -> None:
        self._received.end()
        if owned is not None:
            owned.close()
        self._on_end(self.reply)


async def _open(open_engine: Callable[[], Engine]) -> Engine:
    """Open an engine in a thread; one that is ready after a cancellation is closed."""
    opening = asyncio.ensure_future(asyncio.to_thread(open_engine))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_opened)
        raise


def _close_opened(opening: asyncio.Future[Engine]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


class _Received:
    """What has come of one answer. Times are of this process's clock, as the reader sees them."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._num_prompt = self._num_cached = self._num_tokens = 0
        self._sent_s = self._first_s = self._last_s = 0.0
        self._reason: FinishReason | None = None
        self._has_begun = False

    def begin(self, num_prompt: int) -> None:
        """The request is about to be sent."""
        self._num_prompt, self._sent_s, self._has_begun = num_prompt, perf_counter(), True

    def take(self, event: Event) -> str:
        """The text that an event adds. Raises EngineUnavailable if the request failed."""
        if isinstance(event, Started):
            self._num_cached = event.cached_tokens
        elif isinstance(event, Token):
            self._last_s = perf_counter()
            self._first_s = self._first_s or self._last_s
            self._num_tokens += 1
            self._pieces.append(event.text)
            return event.text
        elif isinstance(event, Finished):
            self._reason = event.reason
            self._pieces.append(event.text)
            return event.text
        elif isinstance(event, Failed):
            raise EngineUnavailable(f"request {event.request_id} failed: {event.error}")
        return ""

    @property
    def is_open(self) -> bool:
        return self._has_begun and self._reason is None

    def end(self) -> None:
        """Nothing more will come."""
        if self.is_open:
            self._reason = "abort"

    def reply(self) -> Reply:
        return Reply(
            text="".join(self._pieces),
            finish_reason=self._reason,
            usage=Usage(
                prompt_tokens=self._num_prompt,
                cached_tokens=self._num_cached,
                completion_tokens=self._num_tokens,
            ),
            ttft_s=self._first_s - self._sent_s if self._first_s else None,
            decode_s=self._last_s - self._first_s,
        )
