"""Messages between the two processes: the length in four bytes, then JSON."""

from __future__ import annotations

import json
import struct
from typing import Any

_LENGTH = struct.Struct("<I")


def pack(message: dict[str, Any]) -> bytes:
    """A message as bytes. Raises TypeError or ValueError for values that are not JSON."""
    text = json.dumps(message).encode()
    return _LENGTH.pack(len(text)) + text


def unpack_length(data: bytes) -> int:
    """The number of bytes of JSON that follow."""
    (length,) = _LENGTH.unpack(data)
    return int(length)
