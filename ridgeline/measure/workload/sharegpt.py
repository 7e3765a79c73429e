"""ShareGPT's conversations: `sharegpt:FILE.json`, `conversations:FILE.json`.

    [{"id": "…", "conversations": [{"from": "human" or "gpt", "value": "…"}, …]}]

`sharegpt` sends the first thing said and asks for as many tokens as the recorded answer had (what
vLLM's benchmark does with this file). `conversations` goes on: each later turn of the user follows
a second after the answer before, with the history as it really became, so that a prefix cache can
show what it is worth.

Lengths are the text's characters over four: this part knows no tokenizer, and the load need only be
the same for everybody. Conversations with an empty first turn or answer, or with a first turn of
more than 4,096 characters, are left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ridgeline.errors import BadInput
from ridgeline.measure.workload.base import Chat, LoadRequest, Message, Turn

CHARS_PER_TOKEN = 4
MAX_FIRST_CHARS = 4096
MAX_OUTPUT = 1024
THINK_S = 1.0
_FORM = '[{"id": "a", "conversations": [{"from": "human", "value": "…"}, …]}]'


class _Said(msgspec.Struct, rename={"who": "from"}):
    who: str
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Said]
    id: str | int = ""


class ShareGpt(msgspec.Struct, frozen=True, kw_only=True):
    """Openings (text, output length) with the turns that follow; `name` reads it again."""

    name: str
    talks: tuple[tuple[Turn, ...], ...]

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        rng = random.Random(f"{seed}/sharegpt")
        order: list[tuple[Turn, ...]] = []
        for index in range(n):
            if not order:
                order = rng.sample(self.talks, len(self.talks))
            first, *later = order.pop()
            yield LoadRequest(
                id=f"{seed}-{index}",
                kind="conversation" if self.name.startswith("conv") else "chat",
                prompt=Chat((Message("user", first.text),)),
                max_tokens=first.max_tokens,
                turns=tuple(later),
                think_s=THINK_S,
            )


def sharegpt(path: str) -> ShareGpt:
    """First turns only."""
    talks = tuple(talk[:1] for talk in _talks(path))
    return ShareGpt(name=f"sharegpt:{path}", talks=talks)


def conversations(path: str) -> ShareGpt:
    """Whole conversations."""
    return ShareGpt(name=f"conversations:{path}", talks=tuple(_talks(path)))


def _talks(path: str) -> list[tuple[Turn, ...]]:
    try:
        rows = msgspec.json.decode(Path(path).read_bytes(), type=list[_Conversation])
    except OSError as error:
        raise BadInput("cannot read the conversations", value=path, fix=str(error)) from None
    except msgspec.MsgspecError as error:
        raise BadInput(f"not a ShareGPT file ({error})", value=path, fix=f"write {_FORM}") from None
    found = [_turns(row.conversations) for row in rows]
    kept = [turns for turns in found if turns and len(turns[0].text) <= MAX_FIRST_CHARS]
    if not kept:
        raise BadInput("no conversation has a question and an answer", value=path)
    return kept


def _turns(said: list[_Said]) -> tuple[Turn, ...]:
    """Pairs of a user's words and an answer, until the first that is not one."""
    turns = []
    for question, answer in zip(said[::2], said[1::2], strict=False):
        if question.who not in ("human", "user") or not (question.value and answer.value):
            break
        length = -(-len(answer.value) // CHARS_PER_TOKEN)
        turns.append(Turn(question.value, min(length, MAX_OUTPUT)))
    return tuple(turns)
