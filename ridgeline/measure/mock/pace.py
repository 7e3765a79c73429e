"""Regular answers: a first token after `ttft_s`, then a chunk of `per_chunk` tokens at a time.

Each chunk follows `itl_s` × `per_chunk` after the previous one. With `slots`, the server is a queue
of known capacity: each request holds a slot for `ttft_s` + (tokens - 1) × `itl_s` seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ridgeline.errors import BadInput
from ridgeline.measure.mock.script import ScriptedPart, final_chunks


class MockPace(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. `slots` None: unlimited concurrency."""

    ttft_s: float = 0.05
    itl_s: float = 0.01
    per_chunk: int = 1
    slots: int | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            if not getattr(self, name) >= 0:
                raise BadInput(f"the pace's {name} must not be negative", value=getattr(self, name))
        if self.per_chunk < 1:
            raise BadInput(
                "the number of tokens per chunk is too small", value=self.per_chunk, limit=">= 1"
            )
        if self.slots is not None and self.slots < 1:
            raise BadInput("the number of slots is too small", value=self.slots, limit=">= 1")

    def parts(self, num_tokens: int) -> Iterator[ScriptedPart]:
        """The stream of one answer of `num_tokens`."""
        sent, at_s = 0, self.ttft_s
        while sent < num_tokens:
            count = min(self.per_chunk if sent else 1, num_tokens - sent)
            at_s += count * self.itl_s if sent else 0.0
            sent += count
            yield ScriptedPart(at_s=at_s, kind="text", text="ab " * count, num_tokens=count)
        yield from final_chunks(at_s, num_tokens)
