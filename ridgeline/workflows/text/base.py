"""What a program that chats needs of a conversation, wherever its model runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Self

from ridgeline.workflows.text.transcript import Reply


class ReplyStream(Protocol):
    """The pieces of one reply; leaving the `with` block stops it."""

    @property
    def reply(self) -> Reply:
        """What has been received so far."""
        ...

    def __iter__(self) -> Iterator[str]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class ChatPartner(Protocol):
    """A conversation that remembers its turns."""

    def stream(self, text: str) -> ReplyStream:
        """Send a message; the reply is streamed."""
        ...

    def reset(self) -> None:
        """Forget every turn but the system prompt."""
        ...

    def save(self, path: str | Path) -> Path:
        """Write the transcript as .json or .html, and return the path."""
        ...

    def close(self) -> None:
        """Release what the conversation holds."""
        ...
