"""Ranks on several machines.

    node 0   ridgeline serve MODEL … --nnodes 2 --master-addr HOST:PORT
    node 1   ridgeline serve MODEL … --nnodes 2 --master-addr HOST:PORT --node-rank 1

Node 0 has rank 0 and the server. It listens on HOST:PORT, where the ranks of other nodes connect
and say which they are; from then on they get the same commands as the ranks of node 0. Tensors go
by gloo, whose ranks meet at PORT + 1. Nothing is authenticated or encrypted: only the nodes may
reach these ports.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterable

import msgspec

from ridgeline.config.settings import PlainSettings
from ridgeline.engine.parallel.messages import Channel
from ridgeline.engine.parallel.resolve import parallel_sizes
from ridgeline.errors import CannotRun, RankFailed
from ridgeline.modelspec.shard import NodeAddress, ranks_of_node

WORKER_MODULE = "ridgeline.engine.parallel.worker"
JOIN_TIMEOUT_S = 600.0
"""Seconds for which nodes wait for each other at the start."""

RETRY_S = 0.5


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A rank of another node has connected."""

    rank: int


def accept_ranks(
    address: NodeAddress, ranks: Iterable[int], timeout_s: float = JOIN_TIMEOUT_S
) -> dict[int, socket.socket]:
    """Connections of the ranks of other nodes. Raises CannotRun where some do not come in time."""
    missing, found = set(ranks), dict[int, socket.socket]()
    until_s = time.monotonic() + timeout_s
    decoder = msgspec.msgpack.Decoder(Join)
    try:
        listener = socket.create_server(address)
    except OSError as error:
        raise CannotRun(f"cannot listen at --master-addr: {error}", value=str(address)) from error
    with listener:
        while missing:
            listener.settimeout(max(0.01, until_s - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise CannotRun(
                    f"ranks {sorted(missing)} of other nodes did not connect to {address}"
                    f" within {timeout_s:g} s",
                    fix="start the same command there with --node-rank",
                ) from None
            connection.settimeout(RETRY_S * 10)
            try:
                joined = Channel(connection).receive(decoder)
            except (TimeoutError, msgspec.DecodeError):
                joined = None
            if joined is None or joined.rank not in missing:
                connection.close()
                continue
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found[joined.rank] = connection
            missing.remove(joined.rank)
    return found


def join(address: NodeAddress, rank: int, timeout_s: float = JOIN_TIMEOUT_S) -> socket.socket:
    """Connect a rank of this node to rank 0. Raises CannotRun if that does not answer in time."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection(address, timeout=RETRY_S * 10)
            break
        except OSError as error:
            if time.monotonic() > until_s:
                raise CannotRun(
                    f"node 0 does not answer: {error}", value=f"--master-addr {address}"
                ) from error
            time.sleep(RETRY_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    Channel(connection).send(Join(rank))
    return connection


def run_node(settings: PlainSettings) -> None:
    """Compute the ranks of this node, which is not node 0, until rank 0 ends.

    Raises BadInput, CannotRun, or RankFailed if a rank fails.
    """
    address = NodeAddress.parse(settings.master_addr)
    ranks = ranks_of_node(parallel_sizes(settings), settings.nnodes, settings.node_rank)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in ranks:
            with join(address, rank) as connection:
                descriptor = connection.fileno()
                workers.append(
                    subprocess.Popen(
                        (sys.executable, "-m", WORKER_MODULE, str(descriptor)),
                        pass_fds=[descriptor],
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
        codes = [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    failed = [rank for rank, code in zip(ranks, codes, strict=True) if code]
    if failed:
        raise RankFailed(f"ranks {failed} of node {settings.node_rank} failed")
