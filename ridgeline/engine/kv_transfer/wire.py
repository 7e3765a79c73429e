"""The protocol between a decode server and a prefill server: messages over one TCP connection.

    decode  ──▶  Hello        the lease, what the blocks must have been computed with, which ones
    prefill ──▶  Opened       the shared memory that holds the blocks; or Ended, with the reason
    decode  ──▶  Alive        the shared memory is open here; else NotOpened
    prefill ──▶  SentBlocks   some are computed: their places and CRC-32; over TCP, then their bytes
            ──▶  Alive        nothing new: the prompt waits or is being computed
            ──▶  Ended        "" if everything wanted was sent, else why not

The decode server closes the connection when it has what it wants. Each message is four bytes of
length and msgpack.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from ridgeline.errors import DECODE_ERRORS

VERSION = 1
MAX_MESSAGE_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")


class ProtocolError(Exception):
    """The other side sent something that is no message of this protocol."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """`wanted` are (group of layers, index of the block); `digest` is that of the tokens."""

    version: int
    lease: str
    signature: str
    digest: bytes
    wanted: list[tuple[int, int]]
    transport: str = "auto"


class SharedMemory(msgspec.Struct, frozen=True, array_like=True):
    """An anonymous file of another process, known by `nonce`, its first bytes."""

    pid: int
    descriptor: int
    num_bytes: int
    nonce: bytes


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """The lease is known. `memory` None: bytes come over the connection."""

    block_bytes: int
    memory: SharedMemory | None = None


class SentBlock(msgspec.Struct, frozen=True, array_like=True):
    """`slot` is the row of the shared memory."""

    group: int
    place: int
    checksum: int
    slot: int


class SentBlocks(msgspec.Struct, frozen=True, array_like=True, tag="blocks"):
    """`inline`: the bytes follow, block by block."""

    blocks: list[SentBlock]
    inline: bool


class NotOpened(msgspec.Struct, frozen=True, array_like=True, tag="not_opened"):
    """The shared memory cannot be opened: send bytes over the connection."""


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """Nothing new."""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """Nothing more will come, for `reason` if that is not ""."""

    reason: str = ""


Answer = Opened | SentBlocks | Alive | Ended


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Raises OSError."""
    data = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket, kind: Any) -> Any:
    """The next message, of a type or a union.

    Raises OSError, also at the end of the stream, or ProtocolError.
    """
    [length] = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError("a message is too long")
    data = _read(connection, length)
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except DECODE_ERRORS as error:
        raise ProtocolError(str(error)) from None


def read_into(connection: socket.socket, target: memoryview) -> None:
    """Fill a buffer. Raises OSError."""
    num_read = 0
    while num_read < len(target):
        num = connection.recv_into(target[num_read:])
        if not num:
            raise ConnectionResetError("the connection ended within a message")
        num_read += num


def _read(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    read_into(connection, memoryview(data))
    return data
