"""What a load asks for: `LoadRequest`, and the contract of everything that produces them.

Invariants of a workload:
- `sample(n, seed)` is a pure function of its arguments: the same n and seed give the same
  requests, and another seed gives other prompt bodies (a shared prefix stays shared: it belongs
  to the workload).
- Output lengths are fixed per request and the end-of-sequence token is ignored, so that two
  configurations of an engine carry the same load whatever tokens they choose.
- Ids are unique within one sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from ridgeline.errors import BadInput


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation; `role` is system, user or assistant."""

    role: str
    content: str


class Chat(msgspec.Struct, frozen=True):
    """A conversation that the target turns into a prompt with its model's chat template."""

    messages: tuple[Message, ...]


Prompt = str | tuple[int, ...] | Chat


class Turn(msgspec.Struct, frozen=True):
    """What a user says later in a conversation, and how much is generated then."""

    text: str
    max_tokens: int


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a load: text, token ids or a conversation, and how much to generate.

    `turns` are what the user will say next, each `think_s` after the answer before: a request with
    turns is the beginning of a conversation, whose history holds the answers that really came.
    """

    id: str
    kind: str
    prompt: Prompt
    max_tokens: int
    ignore_eos: bool = True
    tenant: str = ""
    turns: tuple[Turn, ...] = ()
    think_s: float = 0.0

    def __post_init__(self) -> None:
        empty = not (self.prompt.messages if isinstance(self.prompt, Chat) else self.prompt)
        if empty:
            raise BadInput("a request's prompt is empty", value=self.id, fix="give it some text")
        if self.max_tokens < 1:
            raise BadInput(
                "a request asks for no output", value=self.max_tokens, limit=">= 1 token"
            )

    def next_turn(self, answer: str) -> LoadRequest | None:
        """The request that follows `answer`; None where the conversation is over."""
        if not self.turns:
            return None
        turn, *rest = self.turns
        before = self.prompt if isinstance(self.prompt, Chat) else Chat((_user(self.prompt),))
        reply = Message("assistant", answer or " ")  # an answer may decode to nothing
        name, _, number = self.id.partition("/turn-")
        return msgspec.structs.replace(
            self,
            id=f"{name}/turn-{int(number or 1) + 1}",
            prompt=Chat((*before.messages, reply, Message("user", turn.text))),
            max_tokens=turn.max_tokens,
            turns=tuple(rest),
        )


def _user(prompt: str | tuple[int, ...]) -> Message:
    if isinstance(prompt, str):
        return Message("user", prompt)
    raise BadInput("a conversation cannot go on from token ids", fix="begin it with text")


class Workload(Protocol):
    """A source of requests. `name` is the string that names it again on a command line."""

    @property
    def name(self) -> str: ...

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        """The first `n` requests of this seed, lazily."""
        ...


def plain_chat(chat: Chat) -> str:
    """A conversation as plain text, for a model that has no chat template."""
    lines = [f"{message.role.capitalize()}: {message.content}" for message in chat.messages]
    return "\n\n".join([*lines, "Assistant:"])


class StopsEarly(msgspec.Struct, frozen=True):
    """Another workload whose answers may end with the end-of-sequence token (--no-ignore-eos)."""

    of: Workload

    @property
    def name(self) -> str:
        return f"{self.of.name} (stops early)"

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        for request in self.of.sample(n, seed):
            yield msgspec.structs.replace(request, ignore_eos=False)


class Unstreamed(msgspec.Struct, frozen=True):
    """Another workload whose answers come whole (--no-stream): another load, by its name."""

    of: Workload

    @property
    def name(self) -> str:
        return f"{self.of.name} (whole answers)"

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        return self.of.sample(n, seed)
