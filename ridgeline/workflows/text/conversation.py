"""A conversation with a model in this process: it remembers its turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgeline.engine.engine import Engine
from ridgeline.errors import BadInput
from ridgeline.records import Sampling
from ridgeline.workflows.text.text_stream import TextStream
from ridgeline.workflows.text.transcript import Reply, Transcript, Turn

CHAT_SAMPLING = Sampling(temperature=0.7, max_tokens=512)
"""The defaults of `ridgeline chat`."""


class Conversation:
    """A conversation over an open engine.

    The model sees all earlier turns; their KV cache is reused where the engine caches prefixes. One
    reply at a time. `close_engine`: closing the conversation closes the engine as well.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        system: str | None = None,
        sampling: Sampling = CHAT_SAMPLING,
        close_engine: bool = False,
    ) -> None:
        self.engine, self.sampling, self._close_engine = engine, sampling, close_engine
        self._turns = [] if system is None else [Turn("system", system)]
        self._replies: list[Reply] = []
        self._latest: TextStream | None = None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every message so far, the system prompt included."""
        return tuple(self._turns)

    @property
    def transcript(self) -> Transcript:
        """A record of the conversation so far."""
        return Transcript(
            model=self.engine.info.model, turns=self.turns, replies=tuple(self._replies)
        )

    def send(self, text: str) -> Reply:
        """Send a message and wait for the reply. Errors as in `stream`."""
        with self.stream(text) as stream:
            for _ in stream:
                pass
        return stream.reply

    def stream(self, text: str) -> TextStream:
        """Send a message; the reply is streamed, for `for` or `async for`.

        A reply that is cut off by closing its stream is remembered as far as it came. A message
        that fails, or whose stream is closed, before any text came is forgotten. Reading the stream
        raises BadInput if the model has no chat template, DoesNotFit if the conversation has become
        too long.
        """
        if not text:
            raise BadInput("the message is empty", fix="send at least one character")
        if self._latest is not None and self._latest.is_open:
            raise BadInput(
                "the last reply is still being streamed", fix="read it to its end, or close it"
            )
        turns = [*self._turns, Turn("user", text)]

        def remember(reply: Reply) -> None:
            if stream is self._latest and (reply.text or reply.finish_reason == "stop"):
                self._turns = [*turns, Turn("assistant", reply.text)]
                self._replies.append(reply)

        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        stream = TextStream(self.engine, messages, self.sampling, on_end=remember)
        self._latest = stream
        return stream

    def reset(self) -> None:
        """Forget every turn but the system prompt."""
        self._turns = [turn for turn in self._turns if turn.role == "system"]
        self._replies = []
        self._latest = None

    def close(self) -> None:
        """End the conversation, and its engine if it was opened for it.

        Closing twice does nothing.
        """
        if self._close_engine:
            self.engine.close()

    def to_dict(self) -> dict[str, Any]:
        """The transcript as dicts, lists and plain values."""
        return self.transcript.to_dict()

    def save(self, path: str | Path) -> Path:
        """Write the transcript as .json or .html, by the suffix of `path`, and return the path."""
        return self.transcript.save(path)

    def _repr_html_(self) -> str:
        return self.transcript._repr_html_()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
