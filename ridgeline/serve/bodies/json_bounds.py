"""Bounds on the number of values in a JSON body, checked before any Python object is created.

A body of 4 MiB can hold 1.4 million empty lists: parsing and validating those would hold the event loop
for seconds. Text is cheap, whatever its length; values are not. So separators outside of strings
are counted first, by numpy, which releases the GIL while it works.
"""

from __future__ import annotations

import numpy as np

from ridgeline.serve.errors import ApiError

MAX_CONTAINERS = 1 << 14
"""Lists and objects: messages, their parts, tools, schemas."""
MAX_KEYS = 1 << 15
MAX_FIELDS = 256
"""Of the body itself; unknown ones are listed in a header."""
BYTES_PER_VALUE = 8
"""The largest body holds one value for so many bytes: a token id with its comma is no shorter."""
SMALL_BODY_BYTES = 64 << 10
"""Up to here a body is counted and parsed in less than a few milliseconds."""

_QUOTE, _COMMA, _COLON, _BRACKET, _BRACE = b'",:[{'


def check_json_bounds(body: bytes, max_values: int) -> None:
    """ApiError 400 if a body holds too many values, lists and objects, or keys."""
    if len(body) <= MAX_CONTAINERS:  # a value takes a byte at least
        return
    bare = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    is_outside = np.cumsum(bare == _QUOTE, dtype=np.uint32) % 2 == 0
    containers = ((bare == _BRACKET) | (bare == _BRACE)) & is_outside
    counts = {
        "lists and objects": (int(containers.sum()), MAX_CONTAINERS),
        "keys": (int(((bare == _COLON) & is_outside).sum()), MAX_KEYS),
        "values": (int(((bare == _COMMA) & is_outside).sum()), max_values),
    }
    for what, (count, limit) in counts.items():
        if count > limit:
            message = f"the JSON of the request body holds too many {what}: {count}; limit: {limit}"
            raise ApiError(400, f"{message}; fix: send several requests")
