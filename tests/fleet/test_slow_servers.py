"""A fleet in which every server answers, however slowly, fails no request; on virtual time."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.fleet.virtual_servers import Asked, VirtualFleet, VirtualServer

PARK_S = 30.0  # the gateway's default


def slow_fleet(count: int) -> VirtualFleet:
    return VirtualFleet(count, park_s=PARK_S, retry_share=0.1)


def state_of(fleet: VirtualFleet, server: VirtualServer) -> str:
    return next(b.state for b in fleet.backends.all if b.address.port == server.port)


def asked(name: int = 0, *, num_tokens: int = 20, pace_s: float = 0.1) -> Asked:
    return Asked(name=name, num_tokens=num_tokens, pace_s=pace_s)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("probe_s", [2.5, 8.0, 29.0])
def test_late_probes_fail_no_request(count: int, probe_s: float) -> None:
    fleet = slow_fleet(count)

    async def scene(fleet: VirtualFleet) -> None:
        for server in fleet.servers:
            server.probe_s = probe_s
        await fleet.clients(random.Random(count), 4, fleet.loop.time() + 200)

    fleet.run(scene)
    assert not fleet.wrong, fleet.wrong[:3]
    assert fleet.num_right > 100


def test_server_whose_stream_moves_stays_ready() -> None:
    fleet = slow_fleet(2)
    states: set[str] = set()

    async def scene(fleet: VirtualFleet) -> None:
        first = fleet.servers[0]
        first.probe_s = 1000.0
        stream = asyncio.ensure_future(fleet.ask_innocent(asked(num_tokens=120, pace_s=1.0)))
        while not stream.done():
            await asyncio.sleep(1.0)
            states.add(state_of(fleet, first))
        await stream

    fleet.run(scene)
    assert not fleet.wrong and states == {"ready"}


@pytest.mark.parametrize("count", [1, 2])
def test_long_wait_for_the_first_byte_fails_no_request(count: int) -> None:
    fleet = slow_fleet(count)

    async def scene(fleet: VirtualFleet) -> None:
        for server in fleet.servers:
            server.probe_s, server.first_s = 12.0, 100.0
        await asyncio.gather(*[fleet.ask_innocent(asked(name)) for name in range(6)])

    fleet.run(scene)
    assert not fleet.wrong, fleet.wrong[:3]


def test_silent_streams_continue_elsewhere_and_the_late_server_comes_back() -> None:
    fleet = slow_fleet(2)
    answered_s = 0.0

    async def scene(fleet: VirtualFleet) -> None:
        nonlocal answered_s
        first = fleet.servers[0]
        streams = [asyncio.ensure_future(fleet.ask_innocent(asked(i))) for i in range(6)]
        await asyncio.sleep(0.5)
        first.hangs = True
        start_s = fleet.loop.time()
        await asyncio.gather(*streams)
        answered_s = fleet.loop.time() - start_s
        assert state_of(fleet, first) == "late"
        first.hangs = False
        await asyncio.sleep(2.0)
        assert state_of(fleet, first) == "ready"

    fleet.run(scene)
    assert not fleet.wrong and answered_s < 12.0


def test_silent_server_without_another_keeps_its_streams_and_gets_new_ones() -> None:
    fleet = slow_fleet(1)

    async def scene(fleet: VirtualFleet) -> None:
        (only,) = fleet.servers
        stream = asyncio.ensure_future(fleet.ask_innocent(asked()))
        await asyncio.sleep(0.5)
        only.hangs = True
        await asyncio.sleep(10.0)
        assert state_of(fleet, only) == "late"
        late = asyncio.ensure_future(fleet.ask_innocent(asked(1)))
        await asyncio.sleep(15.0)
        only.hangs = False
        await asyncio.gather(stream, late)

    fleet.run(scene)
    assert not fleet.wrong, fleet.wrong


def test_server_from_which_nothing_comes_is_down_in_the_end() -> None:
    fleet = slow_fleet(1)

    async def scene(fleet: VirtualFleet) -> None:
        (only,) = fleet.servers
        only.hangs = True
        status, answer = await fleet.ask(asked())
        assert status == 503 and b"no backend was ready" in answer
        assert state_of(fleet, only) == "down"
        only.hangs = False
        await asyncio.sleep(2.0)
        await fleet.ask_innocent(asked())

    fleet.run(scene)
    assert not fleet.wrong and fleet.num_right == 1


def test_servers_that_stop_one_after_another_cost_no_retries() -> None:
    fleet = slow_fleet(4)

    async def stop_in_turn() -> None:
        for server in fleet.servers:
            server.probe_s = 3.0
            server.is_stopping = True
            await asyncio.sleep(6.0)
            server.kill()
            server.is_stopping = False
            await asyncio.sleep(12.0)

    async def scene(fleet: VirtualFleet) -> None:
        rng, until_s = random.Random(0), fleet.loop.time() + 75.0
        await asyncio.gather(fleet.clients(rng, 60, until_s), stop_in_turn())

    fleet.run(scene)
    assert not fleet.wrong, fleet.wrong[:3]
    assert fleet.num_right > 1000


def test_all_but_one_stop_at_once() -> None:
    fleet = slow_fleet(6)

    async def scene(fleet: VirtualFleet) -> None:
        for server in fleet.servers[1:]:
            server.is_stopping, server.probe_s = True, 20.0
        await asyncio.gather(*[fleet.ask_innocent(asked(name)) for name in range(60)])

    fleet.run(scene)
    assert not fleet.wrong, fleet.wrong[:3]


@pytest.mark.parametrize("count", [1, 2])
def test_stream_that_stands_still_is_moved_while_its_server_answers(count: int) -> None:
    fleet = slow_fleet(count)
    waited_s = 0.0

    async def scene(fleet: VirtualFleet) -> None:
        nonlocal waited_s
        first, start_s = fleet.servers[0], fleet.loop.time()
        streams = [asyncio.ensure_future(fleet.ask_innocent(asked(i))) for i in range(2 * count)]
        await asyncio.sleep(0.5)
        first.stalled_at_s = fleet.loop.time()
        await asyncio.gather(*streams)
        waited_s = fleet.loop.time() - start_s
        await asyncio.sleep(1.0)
        assert state_of(fleet, first) == "ready"
        assert fleet.gateway.metrics.totals()["resumed"] == 2

    fleet.run(scene)
    assert not fleet.wrong, fleet.wrong[:3]
    assert 60 < waited_s < 70


def test_other_servers_stream_that_stands_still_ends_in_an_error() -> None:
    fleet = slow_fleet(1)
    fleet.servers[0].resumable = False

    async def scene(fleet: VirtualFleet) -> None:
        stream = asyncio.ensure_future(fleet.ask(asked()))
        await asyncio.sleep(0.5)
        fleet.servers[0].stalled_at_s = fleet.loop.time()
        status, answer = await stream
        assert status == 200 and answer.startswith(b'data: {"t":0}')
        assert b"stood still for 60 s" in answer and answer.endswith(b"data: [DONE]\n\n")

    fleet.run(scene)


@pytest.mark.parametrize(("others_s", "given_up_s"), [(150.0, 210.0), (900.0, 600.0)])
def test_other_servers_stream_may_be_preempted_while_others_go_on(
    others_s: float, given_up_s: float
) -> None:
    fleet = slow_fleet(1)
    fleet.servers[0].resumable = False

    async def end_s(fleet: VirtualFleet) -> float:
        status, answer = await fleet.ask(asked())
        assert status == 200 and b"stood still" in answer
        return fleet.loop.time()

    async def scene(fleet: VirtualFleet) -> None:
        stream = asyncio.ensure_future(end_s(fleet))
        await asyncio.sleep(0.5)
        start_s = fleet.servers[0].stalled_at_s = fleet.loop.time()
        while fleet.loop.time() < start_s + others_s:
            assert await fleet.ask(asked(1, num_tokens=100)) == (200, asked(num_tokens=100).answer)
        assert given_up_s - 1 < await stream - start_s < given_up_s + 15

    fleet.run(scene)


OPENED = b'event: message_start\ndata: {"type":"message_start"}\n\n'
DELTA = b'event: content_block_delta\ndata: {"type": "content_block_delta"}\n\n'


@pytest.mark.parametrize(
    ("mark", "resumable"), [(b": open\n\n", True), (b"", False)], ids=["ridgeline", "other"]
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_stream_waits_for_its_first_token_behind_its_opening(
    path: str, mark: bytes, resumable: bool
) -> None:
    fleet = slow_fleet(2)

    async def scene(fleet: VirtualFleet) -> None:
        for server in fleet.servers:
            server.resumable, server.opening, server.opened_s = resumable, OPENED + mark, 100.0
        answer = await fleet.ask(asked(), path=path)
        assert answer == (200, OPENED + asked().answer)
        assert fleet.gateway.metrics.totals()["resumed"] == 0

    fleet.run(scene)


def test_other_servers_stream_stands_still_behind_its_first_delta() -> None:
    fleet = slow_fleet(1)
    (only,) = fleet.servers
    only.resumable, only.opening, only.opened_s = False, OPENED + DELTA, 100.0

    async def scene(fleet: VirtualFleet) -> None:
        status, answer = await fleet.ask(asked(), path="/v1/messages")
        assert status == 200 and answer.startswith(OPENED + DELTA + b"event: error\n")
        assert b"stood still for 60 s" in answer

    fleet.run(scene)


def test_recomputation_that_stands_still_is_moved() -> None:
    fleet = slow_fleet(2)

    async def scene(fleet: VirtualFleet) -> None:
        _, whole = await fleet.ask(asked(), headers=[(b"x-ridgeline-event-ids", b"1")])
        before, line, rest = whole.partition(b'data: {"t":15}')
        last_id = before.rsplit(b"id: ", 1)[1].strip()
        await asyncio.sleep(130.0)  # its tokens are no longer kept
        continuing = fleet.ask(asked(), headers=[(b"last-event-id", last_id)])
        stream, start_s = asyncio.ensure_future(continuing), fleet.loop.time()
        await asyncio.sleep(0.5)
        for server in fleet.servers:
            server.stalled_at_s = fleet.loop.time()
        async with asyncio.timeout(1000):
            assert await stream == (200, line + rest)
        assert 60 < fleet.loop.time() - start_s < 70

    fleet.run(scene)


def test_client_that_does_not_read_makes_no_stream_stand_still() -> None:
    fleet = slow_fleet(1)

    async def scene(fleet: VirtualFleet) -> None:
        status, answer = await fleet.ask(asked(), reads_for_s=0.5)
        assert (status, answer) == (200, asked().answer)
        assert fleet.gateway.metrics.totals()["resumed"] == 0

    fleet.run(scene)


@pytest.mark.parametrize("stopped_s", [4.0, 40.0, 400.0])
def test_gateway_that_was_stopped_blames_no_backend(stopped_s: float) -> None:
    fleet = slow_fleet(2)

    async def scene(fleet: VirtualFleet) -> None:
        streams = [asyncio.ensure_future(fleet.ask_innocent(asked(i))) for i in range(4)]
        await asyncio.sleep(0.5)
        for server in fleet.servers:  # so that a probe is on its way
            server.hangs = True
        await asyncio.sleep(1.5)
        fleet.loop.now_s += stopped_s
        await asyncio.sleep(0.5)
        assert [state_of(fleet, server) for server in fleet.servers] == ["ready", "ready"]
        for server in fleet.servers:
            server.hangs = False
        await asyncio.gather(*streams)
        assert fleet.gateway.metrics.totals()["resumed"] == 0
        rates = [fleet.backends.load.prefill_rate(b.id) for b in fleet.backends.all]
        assert min(rates) > 0.1

    fleet.run(scene)
    assert not fleet.wrong, fleet.wrong[:3]


def test_stream_waits_for_a_full_server() -> None:
    fleet = slow_fleet(2)

    async def scene(fleet: VirtualFleet) -> None:
        first, second = fleet.servers
        second.is_full = True
        streams = [asyncio.ensure_future(fleet.ask_innocent(asked(0)))]
        await asyncio.sleep(0.5)
        first.is_stopping = True  # its stream moves
        await asyncio.sleep(40.0)
        second.is_full = False
        await asyncio.gather(*streams)

    fleet.run(scene)
    assert not fleet.wrong, fleet.wrong[:3]
