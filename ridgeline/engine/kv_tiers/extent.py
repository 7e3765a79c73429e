"""The file format of stored blocks: an extent holds consecutive blocks, and says which.

    magic "RLKV0001" │ length of the header │ CRC-32 of the header │ header (msgpack) │ blocks

The header names the signature of the cache, the size of a block, and the key and CRC-32 of each. A
file that is short, torn, damaged, of another version or of another signature is recognised before a
byte of it is used.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from ridgeline.errors import DECODE_ERRORS

MAGIC = b"RLKV0001"
_PREAMBLE = struct.Struct("<8sII")
PREAMBLE_BYTES = _PREAMBLE.size
HEAD_BYTES = 16 << 10
"""Bytes to read first: the whole header of nearly every extent."""

MAX_HEADER_BYTES = 4 << 20


class BadExtentError(Exception):
    """A file that is no extent of this cache, or is damaged."""


class ExtentHeader(msgspec.Struct, frozen=True, array_like=True):
    """What an extent holds."""

    signature: str
    block_bytes: int
    keys: list[bytes]
    checksums: list[int]


def encode_header(header: ExtentHeader) -> bytes:
    """The bytes before the first block."""
    body = msgspec.msgpack.encode(header)
    return _PREAMBLE.pack(MAGIC, len(body), zlib.crc32(body)) + body


def header_end(head: bytes) -> int:
    """Where the header ends, from the first bytes of a file. Raises BadExtentError."""
    if len(head) < PREAMBLE_BYTES:
        raise BadExtentError("shorter than its preamble")
    magic, length, _ = _PREAMBLE.unpack_from(head)
    if magic != MAGIC:
        raise BadExtentError("not an extent of this version")
    if length > MAX_HEADER_BYTES:
        raise BadExtentError("its header is too long")
    return PREAMBLE_BYTES + int(length)


def decode_header(head: bytes, size: int, signature: str, block_bytes: int) -> ExtentHeader:
    """The header of a file of `size` bytes, from its first `header_end` bytes.

    Raises BadExtentError where anything differs from what it must be.
    """
    end = header_end(head)
    body = head[PREAMBLE_BYTES:end]
    if len(head) < end or zlib.crc32(body) != _PREAMBLE.unpack_from(head)[2]:
        raise BadExtentError("its header is damaged")
    try:
        header = msgspec.msgpack.decode(body, type=ExtentHeader)
    except DECODE_ERRORS as error:
        raise BadExtentError("its header is damaged") from error
    if (header.signature, header.block_bytes) != (signature, block_bytes):
        raise BadExtentError("of another model or format")
    if len(header.keys) != len(header.checksums):
        raise BadExtentError("its header is damaged")
    if size != end + len(header.keys) * block_bytes:
        raise BadExtentError("truncated")
    return header


def extent_name(keys: Sequence[bytes]) -> str:
    """The name of an extent: equal for equal blocks, in every process."""
    return blake2b(b"".join(keys), digest_size=16).hexdigest() + ".kv"
