"""Requests of every kind while servers fail, compared with what an undisturbed server answers."""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import Sequence

import httpx

from tests.fleet.answers import REQUESTS, canonical
from tests.fleet.processes import Replica


async def fetch(http: httpx.AsyncClient, name: str) -> bytes:
    """The answer to a request of REQUESTS as a stream, without ids and times."""
    path, body = REQUESTS[name]
    reply = await http.post(f"/v1/{path}", json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    return canonical(reply.content)


class KillReport:
    """Answers by kind of request, and those that are not what they should be."""

    def __init__(self) -> None:
        self.num_answers = collections.Counter[str]()
        self.wrong: list[str] = []

    async def ask_until(
        self, http: httpx.AsyncClient, right: dict[str, bytes], first: int, is_over: asyncio.Event
    ) -> None:
        """Send requests of every kind in turn, and compare their answers."""
        names = list(right)
        while not is_over.is_set():
            name = names[first % len(names)]
            first += 1
            try:
                answer = await fetch(http, name)
                if answer != right[name]:
                    self.wrong.append(f"{name}: {answer[-300:]!r}")
            except Exception as error:
                self.wrong.append(f"{name}: {type(error).__name__} {error}")
            self.num_answers[name] += 1


async def kill_replicas(replicas: Sequence[Replica], num_kills: int, rng: random.Random) -> None:
    """SIGKILL random servers, one after another, while another one is ready; start them again."""
    for _ in range(num_kills):
        await asyncio.sleep(rng.uniform(0.05, 0.5))
        while len(ready := [replica for replica in replicas if replica.is_ready()]) < 2:
            await asyncio.sleep(0.05)
        victim = rng.choice(ready)
        await asyncio.to_thread(victim.kill)
        victim.start()
