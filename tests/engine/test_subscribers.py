"""One wake-up per step on an asyncio loop; first tokens are delivered before others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from ridgeline.engine.event_delivery import AsyncInboxes
from ridgeline.records import Event, Finished, Started, Token, Usage

USAGE = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)


def token(request_id: str) -> Token:
    return Token(request_id=request_id, index=0, token=1, text="a", at_s=0.0)


def started(request_id: str) -> Started:
    return Started(request_id=request_id, at_s=0.0, cached_tokens=0)


def finished(request_id: str) -> Finished:
    return Finished(request_id=request_id, index=0, reason="stop", at_s=0.0, usage=USAGE)


class Listeners:
    """Requests a, b, c and the events delivered to them, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[str]]] = []
        self.inboxes = AsyncInboxes(asyncio.get_running_loop())
        self.opened = {
            name: self.inboxes.open(name, partial(self._hear, name), 1) for name in "abc"
        }

    def _hear(self, name: str, events: Sequence[Event]) -> None:
        self.heard.append((name, [type(event).__name__ for event in events]))

    async def say(self, *steps: Sequence[Event]) -> list[tuple[str, list[str]]]:
        self.heard = []
        for events in steps:
            self.inboxes.deliver(events)
        await asyncio.sleep(0)
        return self.heard


async def _first_tokens() -> None:
    ears = Listeners()
    assert await ears.say([token("a"), token("b")]) == [("a", ["Token"]), ("b", ["Token"])]
    heard = await ears.say([token("a"), token("b"), started("c")])
    assert heard[0] == ("c", ["Started"])  # still without a token: first again
    heard = await ears.say([token("a"), token("b"), token("c")])
    assert [name for name, _ in heard] == ["c", "a", "b"]
    heard = await ears.say([token("a"), token("b"), token("c")])
    assert [name for name, _ in heard] == ["a", "b", "c"]


async def _several_steps() -> None:
    ears = Listeners()
    heard = await ears.say([token("a")], [token("b"), token("a")], [finished("a")])
    assert heard == [("a", ["Token", "Token", "Finished"]), ("b", ["Token"])]
    assert await ears.say([token("a"), token("b")]) == [("b", ["Token"])]  # a has ended


async def _left_meanwhile() -> None:
    ears = Listeners()

    def leaves_with_b(_events: Sequence[Event]) -> None:
        ears.inboxes.close("b", ears.opened["b"])

    ears.opened["a"].sink = leaves_with_b
    assert await ears.say([token("a"), token("b"), token("c")]) == [("c", ["Token"])]


def test_first_tokens_go_first() -> None:
    asyncio.run(_first_tokens())


def test_events_of_several_steps_arrive_together_in_order() -> None:
    asyncio.run(_several_steps())


def test_subscriber_that_leaves_during_delivery_receives_nothing() -> None:
    asyncio.run(_left_meanwhile())
