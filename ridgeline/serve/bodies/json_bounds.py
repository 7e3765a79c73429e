"""Bounds on the number of values in a JSON body, checked before any Python object is created.

A body of 4 MiB can hold 1.4 million empty lists: parsing and validating those would hold the event
loop for seconds. Text is cheap, whatever its length; values are not. So separators outside of
strings are counted first, in pieces, so that other threads can run in between.
"""

from __future__ import annotations

from ridgeline.serve.errors import ApiError

MAX_CONTAINERS = 1 << 14
"""Lists and objects: messages, their parts, tools, schemas."""
MAX_KEYS = 1 << 15
MAX_FIELDS = 256
"""Of the body itself; unknown ones are listed in a header."""
BYTES_PER_VALUE = 8
"""A body may hold one value per 8 bytes of the size limit: about a token id and its comma."""
SMALL_BODY_BYTES = 64 << 10
"""Up to here a body is counted and parsed in less than a few milliseconds."""

_PIECE = 1 << 16
_NO_STRUCTURE = bytes(set(range(256)) - set(b'",:[{'))


def check_json_bounds(body: bytes, max_values: int) -> None:
    """ApiError 400 if a body holds too many values, lists and objects, or keys."""
    if len(body) <= MAX_CONTAINERS:  # a value takes a byte at least
        return
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_STRUCTURE)
    num_containers = num_keys = num_values = is_inside = 0
    for start in range(0, len(bare), _PIECE):
        parts = bare[start : start + _PIECE].split(b'"')
        outside = b"".join(parts[is_inside::2])
        is_inside ^= (len(parts) - 1) % 2
        num_containers += outside.count(b"[") + outside.count(b"{")
        num_keys += outside.count(b":")
        num_values += outside.count(b",")
    _check(num_containers, MAX_CONTAINERS, "lists and objects")
    _check(num_keys, MAX_KEYS, "keys")
    _check(num_values, max_values, "values")


def _check(count: int, limit: int, what: str) -> None:
    if count > limit:
        message = f"the JSON of the request body holds too many {what}: {count}; limit: {limit}"
        raise ApiError(400, f"{message}; fix: send several requests")
