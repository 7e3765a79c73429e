"""`LoadRequest`, and the protocol of workloads, which produce them.

Invariants of a workload:
- `sample(n, seed)` is a pure function of its arguments: the same n and seed give the same
  requests, and another seed gives other prompt bodies (a shared prefix stays shared: it belongs
  to the workload).
- Output lengths are fixed per request and the end-of-sequence token is ignored, so that two
  configurations of an engine carry the same load whatever tokens they generate.
- Ids are unique within one sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from ridgeline.errors import BadInput


class PromptMessage(msgspec.Struct, frozen=True):
    """One message of a conversation; `role` is system, user or assistant."""

    role: str
    content: str


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation; the target renders it with the chat template of its model."""

    messages: tuple[PromptMessage, ...]


Prompt = str | tuple[int, ...] | ChatPrompt


class UserTurn(msgspec.Struct, frozen=True):
    """A later message of the user in a conversation, and how many tokens are generated then."""

    text: str
    max_tokens: int


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a load: text, token ids or a conversation, and how many tokens to generate.

    `turns` are the next messages of the user, each `think_s` seconds after the previous answer. The
    history of such a conversation holds the answers that the server actually gave.
    """

    id: str
    kind: str
    prompt: Prompt
    max_tokens: int
    ignore_eos: bool = True
    tenant: str = ""
    turns: tuple[UserTurn, ...] = ()
    think_s: float = 0.0

    def __post_init__(self) -> None:
        empty = not (self.prompt.messages if isinstance(self.prompt, ChatPrompt) else self.prompt)
        if empty:
            raise BadInput("the prompt of a request is empty", value=self.id, fix="add text to it")
        if self.max_tokens < 1:
            raise BadInput(
                "the output length of a request is too small",
                value=self.max_tokens,
                limit=">= 1 token",
            )

    def next_turn(self, answer: str) -> LoadRequest | None:
        """The request that follows `answer`; None if the conversation has ended."""
        if not self.turns:
            return None
        turn, *rest = self.turns
        before = (
            self.prompt
            if isinstance(self.prompt, ChatPrompt)
            else ChatPrompt((_user(self.prompt),))
        )
        reply = PromptMessage("assistant", answer or " ")  # an answer may decode to nothing
        name, _, number = self.id.partition("/turn-")
        return msgspec.structs.replace(
            self,
            id=f"{name}/turn-{int(number or 1) + 1}",
            prompt=ChatPrompt((*before.messages, reply, PromptMessage("user", turn.text))),
            max_tokens=turn.max_tokens,
            turns=tuple(rest),
        )


def _user(prompt: str | tuple[int, ...]) -> PromptMessage:
    if isinstance(prompt, str):
        return PromptMessage("user", prompt)
    raise BadInput("a conversation cannot continue token ids", fix="start it with text")


class Workload(Protocol):
    """A source of requests. `name` is its value on a command line."""

    @property
    def name(self) -> str: ...

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        """The first `n` requests of this seed, lazily."""
        ...


def plain_chat(chat: ChatPrompt) -> str:
    """A conversation as plain text, for a model without a chat template."""
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
    """Another workload whose answers are not streamed (--no-stream); it has its own name."""

    of: Workload

    @property
    def name(self) -> str:
        return f"{self.of.name} (whole answers)"

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        return self.of.sample(n, seed)
