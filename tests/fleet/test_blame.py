"""What is blamed for crashes: on virtual time, real gateway, scripted servers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from ridgeline.fleet.crashes.blame import Blame
from ridgeline.fleet.parking import Parking
from tests.fleet.virtual_servers import Asked, VirtualFleet

LEAST_LIFE_S = 1.0
"""Of a server on average, so that innocent requests differ from those that crash servers."""


def pill(name: int = -1, fatal_s: float = 0.1) -> Asked:
    """A request that ends every server that it is sent to."""
    return Asked(name=name, num_tokens=2000, pace_s=0.05, fatal_s=fatal_s)


def disturb(
    seed: int, *, num_servers: int, num_faults: int, every_s: float, kill_share: float
) -> VirtualFleet:
    """Kill servers and cut connections at random while clients ask."""
    fleet, rng = VirtualFleet(num_servers, repair_s=1.0), random.Random(seed)

    async def faults(until_s: float) -> None:
        while fleet.loop.time() < until_s:
            await asyncio.sleep(rng.expovariate(1 / every_s))
            server = rng.choice(fleet.servers)
            (server.kill if rng.random() < kill_share else server.cut)()

    async def scene(fleet: VirtualFleet) -> None:
        until_s = fleet.loop.time() + num_faults * every_s
        await asyncio.gather(fleet.clients(rng, 6, until_s), faults(until_s))

    fleet.run(scene)
    return fleet


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kill_share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("every_s", [0.3, 3.0])
def test_no_innocent_request_is_refused(seed: int, kill_share: float, every_s: float) -> None:
    fleet = disturb(
        seed, num_servers=2 + seed, num_faults=60, every_s=every_s, kill_share=kill_share
    )
    assert not fleet.wrong, fleet.wrong[:3]
    assert fleet.num_right > 10


@pytest.mark.parametrize("num_servers", [1, 2, 5])
@pytest.mark.parametrize("names_itself", [True, False])
@pytest.mark.parametrize(("age_s", "fatal_s", "most"), [(2, 0.1, 5), (400, 0.1, 3), (400, 2, 8)])
def test_request_that_crashes_servers_is_stopped(
    num_servers: int, names_itself: bool, age_s: float, fatal_s: float, most: int
) -> None:
    fleet = VirtualFleet(num_servers, names_itself=names_itself)
    rng = random.Random(num_servers)

    async def scene(fleet: VirtualFleet) -> None:
        async def poison() -> None:
            await asyncio.sleep(2)
            _, answer = await fleet.ask(pill(fatal_s=fatal_s))
            assert b"this request is refused" in answer
            for _ in range(5):  # equal ones reach no server
                assert (await fleet.ask(pill(fatal_s=fatal_s)))[0] == 500
                await asyncio.sleep(1)

        await asyncio.sleep(age_s)
        await asyncio.gather(fleet.clients(rng, 4, fleet.loop.time() + 30), poison())

    fleet.run(scene)
    most += num_servers == 1  # companions come along, and have to be separated
    assert 3 <= sum(server.num_fatal for server in fleet.servers) <= most
    assert not fleet.wrong, fleet.wrong[:3]


def test_blame_decays_and_is_renewed_by_one_crash() -> None:
    fleet = VirtualFleet(3)
    deaths: list[int] = []

    async def scene(fleet: VirtualFleet) -> None:
        for _ in range(8):
            await fleet.ask(pill())
            deaths.append(sum(server.num_fatal for server in fleet.servers))
            await asyncio.sleep(300)

    fleet.run(scene)
    assert deaths[0] <= 5 and deaths[-1] <= deaths[0] + 7


def test_equal_requests_at_once_are_one_suspect() -> None:
    fleet = VirtualFleet(3)

    async def scene(fleet: VirtualFleet) -> None:
        replies = await asyncio.gather(*[fleet.ask(pill()) for _ in range(12)])
        assert all(b"this request is refused" in answer for _, answer in replies)

    fleet.run(scene)
    assert sum(server.num_started - 1 for server in fleet.servers) <= 6


def test_companion_of_a_request_that_crashes_servers_is_spared() -> None:
    fleet = VirtualFleet(1)

    async def scene(fleet: VirtualFleet) -> None:
        asked = [Asked(name=i, num_tokens=20, pace_s=0.1) for i in range(4)]
        *_, (_, answer) = await asyncio.gather(*map(fleet.ask_innocent, asked), fleet.ask(pill()))
        assert b"this request is refused" in answer

    fleet.run(scene)
    assert not fleet.wrong, fleet.wrong
    assert fleet.servers[0].num_fatal <= 5


def test_two_that_are_always_together_are_not_distinguished() -> None:
    blame, now_s = Blame(), 0.0
    for _ in range(6):
        now_s += 1.0
        blame.note_death({b"a": 0.1, b"b": 0.1}, now_s)
    assert not blame.is_condemned(b"a", now_s) and not blame.is_condemned(b"b", now_s)
    blame.clear(b"b", now_s)
    assert blame.is_condemned(b"a", now_s) and not blame.is_condemned(b"b", now_s)


def test_crash_that_was_none_is_taken_back() -> None:
    blame = Blame()
    deaths = [blame.note_death({b"a": 0.01}, float(i)) for i in range(3)]
    assert blame.is_condemned(b"a", 3.0)
    blame.retract(deaths[1], 3.0)
    assert not blame.is_condemned(b"a", 3.0)
    for death in (deaths[0], deaths[2]):
        blame.retract(death, 4.0)
    assert blame.evidence(b"a", 4.0) == 0.0


@pytest.mark.slow
def test_suspects_wait_while_no_server_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five kills a second leave all three servers down again and again. (A request of three seconds
    then dies with its server each time: some innocent ones are refused, which is not asked here.)
    """
    waits, wait = Counter[float](), Parking.wait

    async def counted(parking: Parking, deadline_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        waits[now_s] += 1
        assert waits[now_s] < 1000, f"the gateway spins at {now_s} s"
        await wait(parking, deadline_s)

    monkeypatch.setattr(Parking, "wait", counted)
    fleet = disturb(15, num_servers=3, num_faults=500, every_s=0.2, kill_share=1.0)
    assert fleet.num_right > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 16))
def test_thousands_of_kills_and_cuts_and_pills_among_them(seed: int) -> None:
    rng = random.Random(seed)
    num_servers = rng.randrange(2, 6)
    every_s, kill_share = rng.choice([0.2, 0.5, 1.0, 4.0]), rng.choice([0.2, 0.5, 1.0])
    # A server lives for a second on average: with less, requests of three seconds die each time.
    every_s = max(every_s, LEAST_LIFE_S * kill_share / num_servers)
    fleet = disturb(
        seed, num_servers=num_servers, num_faults=500, every_s=every_s, kill_share=kill_share
    )
    assert not fleet.wrong, fleet.wrong[:3]
