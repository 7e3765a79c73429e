"""Conversations of ShareGPT: `sharegpt:FILE.json`, `conversations:FILE.json`.

    [{"id": "…", "conversations": [{"from": "human" or "gpt", "value": "…"}, …]}]

`sharegpt` sends the first message and generates as many tokens as the recorded answer had, as
vLLM's benchmark does with this file. `conversations` continues: each later message of the user
follows a second after the previous answer, with the actual answers as history, so that the effect
of a prefix cache shows.

Lengths are the characters of a text divided by four: no tokenizer is needed, and the load is the
same for every server. Conversations with an empty first message or answer, or with a first message
of more than 4,096 characters, are skipped.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput
from ridgeline.measure.workload.base import ChatPrompt, LoadRequest, PromptMessage, UserTurn

CHARS_PER_TOKEN = 4
MAX_FIRST_CHARS = 4096
MAX_OUTPUT = 1024
THINK_S = 1.0
_FORM = '[{"id": "a", "conversations": [{"from": "human", "value": "…"}, …]}]'


class _RecordedMessage(msgspec.Struct, rename={"sender": "from"}):
    sender: str
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_RecordedMessage]
    id: str | int = ""


class ShareGpt(msgspec.Struct, frozen=True, kw_only=True):
    """First messages (text, output length) with the turns that follow."""

    name: str
    conversations: tuple[tuple[UserTurn, ...], ...]

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        rng = random.Random(f"{seed}/sharegpt")
        order: list[tuple[UserTurn, ...]] = []
        for index in range(n):
            if not order:
                order = rng.sample(self.conversations, len(self.conversations))
            first, *later = order.pop()
            yield LoadRequest(
                id=f"{seed}-{index}",
                kind="conversation" if self.name.startswith("conv") else "chat",
                prompt=ChatPrompt((PromptMessage("user", first.text),)),
                max_tokens=first.max_tokens,
                turns=tuple(later),
                think_s=THINK_S,
            )


def sharegpt(path: str) -> ShareGpt:
    """The first message of every conversation. Raises BadInput."""
    conversations = tuple(turns[:1] for turns in _read(path))
    return ShareGpt(name=f"sharegpt:{path}", conversations=conversations)


def conversations(path: str) -> ShareGpt:
    """All turns of every conversation. Raises BadInput."""
    return ShareGpt(name=f"conversations:{path}", conversations=tuple(_read(path)))


def _read(path: str) -> list[tuple[UserTurn, ...]]:
    try:
        rows = msgspec.json.decode(Path(path).read_bytes(), type=list[_Conversation])
    except OSError as error:
        raise BadInput("cannot read the conversations", value=path, fix=str(error)) from None
    except DECODE_ERRORS as error:
        raise BadInput(f"not a ShareGPT file ({error})", value=path, fix=f"write {_FORM}") from None
    parsed = [_turns(row.conversations) for row in rows]
    usable = [turns for turns in parsed if turns and len(turns[0].text) <= MAX_FIRST_CHARS]
    if not usable:
        raise BadInput("no conversation has a question and an answer", value=path)
    return usable


def _turns(messages: list[_RecordedMessage]) -> tuple[UserTurn, ...]:
    """Question and answer pairs, up to the first that is not one."""
    turns = []
    for question, answer in zip(messages[::2], messages[1::2], strict=False):
        if question.sender not in ("human", "user") or not (question.value and answer.value):
            break
        length = -(-len(answer.value) // CHARS_PER_TOKEN)
        turns.append(UserTurn(question.value, min(length, MAX_OUTPUT)))
    return tuple(turns)
