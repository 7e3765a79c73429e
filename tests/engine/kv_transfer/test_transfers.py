"""Prefill on one engine and decode on another give the tokens of one engine, whatever happens."""

from __future__ import annotations

import asyncio
import random
import socket
import time
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.engine.engine import Engine
from ridgeline.engine.kv_transfer import block_fetcher, block_server
from ridgeline.engine.kv_transfer.block_server import BlockServer
from ridgeline.errors import BadInput, CannotRun
from ridgeline.records import KvTransferParams, OutputGrammar, Sampling
from tests.engine.kv_transfer.two_engines import (
    SETTINGS,
    begin_prefill,
    client_of,
    complete,
    fallbacks,
    hand_over,
    two_engines,
)

Pair = tuple[Engine, Engine]
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, max_tokens=8),
    "sampled": Sampling(temperature=1.0, seed=7, max_tokens=8, n=2),
    "penalised": Sampling(
        temperature=0.9, seed=3, max_tokens=8, frequency_penalty=1.1, repetition_penalty=1.2
    ),
    "structured": Sampling(
        temperature=0.0, max_tokens=12, structured=OutputGrammar("regex", "[a-c]{4,8}")
    ),
}


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i * i + 3 * i + salt) % 3000 + 5 for i in range(length)]


@pytest.fixture(scope="module")
def reference() -> Iterator[Engine]:
    with Engine.open("demo", **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared() -> Iterator[Pair]:
    with two_engines() as pair:
        yield pair


@pytest.fixture(scope="module")
def tcp() -> Iterator[Pair]:
    with two_engines(disaggregation_transfer_backend="tcp") as pair:
        yield pair


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_tokens_are_those_of_one_engine(
    kind: str, transport: str, reference: Engine, request: pytest.FixtureRequest
) -> None:
    pair: Pair = request.getfixturevalue(transport)
    client = client_of(pair[1])
    before, in_memory = client.num_bytes, client.num_shared_bytes
    prompt = prompt_of(200, salt=sum(map(ord, kind)))
    expected = asyncio.run(complete(reference, prompt, SAMPLINGS[kind]))
    assert asyncio.run(hand_over(*pair, prompt, SAMPLINGS[kind])) == expected
    moved = client.num_bytes - before
    assert moved == 12 * client.block_bytes
    assert client.num_shared_bytes - in_memory == (moved if transport == "shared" else 0)
    assert fallbacks(pair[1]) == {}


def test_random_schedules_give_the_tokens_of_one_engine(reference: Engine, shared: Pair) -> None:
    rng = random.Random(5)
    head = prompt_of(150, salt=11)
    prompts = [
        head[: rng.choice((0, 60, 150))] + prompt_of(rng.randint(1, 200), salt=i) for i in range(12)
    ]
    samplings = [rng.choice(list(SAMPLINGS.values())) for _ in prompts]

    async def all_at_once(served: Any) -> list[list[list[int]]]:
        return list(await asyncio.gather(*map(served, prompts, samplings)))

    expected = asyncio.run(all_at_once(lambda p, s: complete(reference, p, s)))
    answers = asyncio.run(all_at_once(lambda p, s: hand_over(*shared, p, s)))
    assert answers == expected
    assert fallbacks(shared[1]) == {}
    transfers: Any = shared[0].transfers
    assert len(transfers.leases) == 0


def test_prompt_shorter_than_a_block_has_no_lease(shared: Pair) -> None:
    assert shared[0].transfers.open_lease(prompt_of(16)) is None


def test_only_missing_blocks_of_a_conversation_are_fetched(reference: Engine, shared: Pair) -> None:
    client, sampling = client_of(shared[1]), SAMPLINGS["greedy"]
    first = prompt_of(120, salt=77)
    asyncio.run(hand_over(*shared, first, sampling))
    before = client.num_blocks
    longer = first[:112] + prompt_of(60, salt=78)
    expected = asyncio.run(complete(reference, longer, sampling))
    assert asyncio.run(hand_over(*shared, longer, sampling)) == expected
    assert client.num_blocks - before == (172 - 1) // 16 - 7


def test_resumed_request_fetches_its_prompt(reference: Engine, shared: Pair) -> None:
    prompt, sampling = prompt_of(130, salt=205), SAMPLINGS["sampled"]
    expected = asyncio.run(complete(reference, prompt, sampling))
    resumed = tuple(tuple(own[:3]) for own in expected)
    before = client_of(shared[1]).num_blocks
    assert asyncio.run(hand_over(*shared, prompt, sampling, resumed=resumed)) == expected
    assert client_of(shared[1]).num_blocks - before == 8


# -- faults


def answer_under(pair: Pair, reference: Engine, salt: int) -> set[str]:
    """Check the answer to one request; the reasons why blocks were computed here."""
    prompt, sampling = prompt_of(170, salt=salt), SAMPLINGS["sampled"]
    before = dict(client_of(pair[1]).fallbacks)
    expected = asyncio.run(complete(reference, prompt, sampling))
    assert asyncio.run(hand_over(*pair, prompt, sampling)) == expected
    after = client_of(pair[1]).fallbacks
    return {reason for reason, num in after.items() if num > before[reason]}


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_corrupt_block_is_computed(
    transport: str,
    reference: Engine,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair: Pair = request.getfixturevalue(transport)
    original = BlockServer._send

    def send_corrupt(self: BlockServer, connection: Any, blocks: Any, *, inline: bool) -> None:
        """The bytes change after their checksum was taken."""
        row = self._slab.row(blocks[0][1])

        def crc32(data: memoryview) -> int:
            checksum = zlib.crc32(data)
            row[5] ^= 1
            return checksum

        with monkeypatch.context() as patched:
            patched.setattr(block_server, "zlib", SimpleNamespace(crc32=crc32))
            original(self, connection, blocks[:1], inline=inline)

    monkeypatch.setattr(BlockServer, "_send", send_corrupt)
    assert answer_under(pair, reference, salt=21 + len(transport)) == {"checksum"}


def test_blocks_that_never_come_are_computed(
    reference: Engine, tcp: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = BlockServer._send
    monkeypatch.setattr(
        BlockServer,
        "_send",
        lambda self, connection, blocks, *, inline: original(
            self, connection, blocks[:1], inline=inline
        ),
    )
    assert answer_under(tcp, reference, salt=31) == {"prefill_failed"}


def test_silent_server_is_not_waited_for(
    reference: Engine, tcp: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_fetcher, "STALL_S", 0.1)
    original = BlockServer._send

    def send_late(self: BlockServer, *args: Any, **options: Any) -> None:
        time.sleep(0.4)
        original(self, *args, **options)

    monkeypatch.setattr(BlockServer, "_send", send_late)
    assert answer_under(tcp, reference, salt=41) == {"stalled"}


def test_server_that_breaks_off_costs_only_its_blocks(
    reference: Engine, tcp: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(self: BlockServer, connection: socket.socket, *_: Any, **__: Any) -> None:
        connection.shutdown(socket.SHUT_RDWR)

    monkeypatch.setattr(BlockServer, "_send", break_off)
    assert answer_under(tcp, reference, salt=51) == {"lost"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"remote_request_id": "0" * 32}, "lease"),
        ({"remote_engine_id": "other"}, "signature"),
        ({"num_tokens": 32}, "content"),
        ({"num_tokens": 33}, "content"),
        ({"remote_port": 1}, "unreachable"),
        ({"remote_host": "10.9.9.9"}, "not_allowed"),
    ],
)
def test_wrong_handle_is_not_used(
    changes: dict[str, Any], reason: str, reference: Engine, tcp: Pair
) -> None:
    prefill, decode = tcp
    prompt = prompt_of(100, salt=sum(map(ord, str(changes))))
    before = client_of(decode).fallbacks[reason]

    async def served() -> list[list[int]]:
        params, computing = await begin_prefill(prefill, prompt)
        assert params is not None
        fields = {name: getattr(params, name) for name in params.__struct_fields__} | changes
        own = KvTransferParams(**fields)
        answer = await complete(decode, prompt, SAMPLINGS["greedy"], kv_source=own)
        prefill.transfers.close_lease(params.remote_request_id)
        if computing is not None:
            await computing
        return answer

    assert asyncio.run(served()) == asyncio.run(complete(reference, prompt, SAMPLINGS["greedy"]))
    assert client_of(decode).fallbacks[reason] == before + 1


def test_handle_of_another_prompt_is_not_used(reference: Engine, tcp: Pair) -> None:
    prefill, decode = tcp
    prompt, other = prompt_of(100, salt=91), prompt_of(100, salt=92)
    before = client_of(decode).fallbacks["content"]

    async def served() -> list[list[int]]:
        params, computing = await begin_prefill(prefill, other)
        answer = await complete(decode, prompt, SAMPLINGS["greedy"], kv_source=params)
        if computing is not None:
            await computing
        return answer

    assert asyncio.run(served()) == asyncio.run(complete(reference, prompt, SAMPLINGS["greedy"]))
    assert client_of(decode).fallbacks["content"] == before + 1


def test_unfetched_lease_expires_and_frees_its_slots() -> None:
    with two_engines(prefill_disaggregation_timeout_s=0.1) as (prefill, _):
        transfers: Any = prefill.transfers

        async def never_fetched() -> None:
            _, computing = await begin_prefill(prefill, prompt_of(100))
            assert computing is not None
            await computing

        asyncio.run(never_fetched())
        deadline_s = time.monotonic() + 5
        while len(transfers.leases) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert transfers.leases.num_expired == 1
        assert not transfers.leases._memory._pins


def test_prefill_engine_that_stops_leaves_the_rest_to_the_decode_engine(
    reference: Engine,
) -> None:
    prompt, sampling = prompt_of(400, salt=13), SAMPLINGS["penalised"]
    with two_engines(prefill_max_num_batched_tokens=16) as (prefill, decode):

        async def served() -> list[list[int]]:
            params, computing = await begin_prefill(prefill, prompt)
            answer = asyncio.ensure_future(complete(decode, prompt, sampling, kv_source=params))
            await asyncio.sleep(0.02)
            await asyncio.to_thread(prefill.close)
            assert computing is not None
            await asyncio.wait([computing])
            return await answer

        assert asyncio.run(served()) == asyncio.run(complete(reference, prompt, sampling))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"enable_prefix_caching": False}, BadInput, "no-enable-prefix-caching"),
        ({"tensor_parallel_size": 2}, CannotRun, "one process"),
        ({"disaggregation_peers": ("10.0.0.1:*",)}, BadInput, "has no effect"),
        (
            {"kv_eviction_config": {"method": "streaming", "budget": 64}},
            CannotRun,
            "kv-eviction-config",
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Engine.open("demo", disaggregation_mode="prefill", **settings)


def test_options_without_a_role_are_refused() -> None:
    with pytest.raises(BadInput, match="has no effect with --disaggregation-mode none"):
        Engine.open("demo", disaggregation_port=9000)
