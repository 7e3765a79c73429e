"""Pieces for many connections in one go: all of them arrive, each connection's in order."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from ridgeline._native import send_each
from ridgeline.serve.http.batched_writes import Pieces, Post


class Pair:
    """A transport, and the far end of its connection."""

    def __init__(self, transport: asyncio.Transport, far: socket.socket) -> None:
        self.transport, self.far = transport, far
        self.received = b""

    @staticmethod
    async def make(buffer_bytes: int = 1 << 16) -> Pair:
        near, far = socket.socketpair()
        near.setblocking(False)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        far.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=near)
        return Pair(transport, far)

    async def read(self, num_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        while len(self.received) < num_bytes:
            self.received += await loop.sock_recv(self.far, 1 << 16)
        return self.received


async def test_random_pieces_arrive_in_order_whoever_reads_slowly() -> None:
    rng, sender = random.Random(3), Post()
    pairs = [await Pair.make(4096) for _ in range(9)]
    wanted = [b""] * len(pairs)
    for _ in range(40):
        for _ in range(rng.randint(0, 12)):
            i = rng.randrange(len(pairs))
            piece = rng.randbytes(rng.choice((1, 30, 3000, 30_000)))
            sender.add(pairs[i].transport, piece)
            wanted[i] += piece
        await asyncio.sleep(0)
    for pair, all_of_it in zip(pairs, wanted, strict=True):
        assert await pair.read(len(all_of_it)) == all_of_it
        pair.transport.close()
        pair.far.close()


async def test_one_connection_that_is_lost_is_its_own_affair() -> None:
    sender, pairs = Post(), [await Pair.make() for _ in range(3)]
    pairs[0].far.close()
    for _ in range(3):
        for pair in pairs:
            sender.add(pair.transport, b"token")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [await pair.read(15) for pair in pairs[1:]] == [b"token" * 3] * 2
    assert pairs[0].transport.is_closing()
    for pair in pairs[1:]:
        pair.transport.close()
        pair.far.close()


@pytest.mark.parametrize("sends", [True, False])
async def test_a_descriptor_that_may_be_anothers_is_left_alone(sends: bool) -> None:
    sender, pairs, used = Post(), [await Pair.make() for _ in range(3)], []

    def each(pieces: Pieces) -> list[int]:
        used.extend(number for number, _ in pieces)
        return list(send_each(pieces)) if sends else [0] * len(pieces)

    sender.__dict__["_each"] = each
    numbers = [pair.transport.get_extra_info("socket").fileno() for pair in pairs]
    for pair in pairs:
        sender.add(pair.transport, b"token")
    pairs[1].transport.abort()
    await asyncio.sleep(0)
    assert used == [numbers[0], numbers[2]]
    for pair in (pairs[0], pairs[2]):
        assert await pair.read(5) == b"token"
        pair.transport.close()
        pair.far.close()
    pairs[1].far.close()


def test_what_the_system_says_of_each() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        full, refused, none = send_each(
            ((near.fileno(), b"x" * 10_000_000), (1 << 20, b"x"), (near.fileno(), b""))
        )
        assert 0 < full < 10_000_000 and refused < 0 and none == 0
