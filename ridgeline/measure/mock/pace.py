"""Regular answers: a first token after `ttft_s`, then one chunk of `per_chunk` tokens every
`itl_s` x `per_chunk`, as many tokens as the request asks for.

With `slots` the server is a queue with a known answer: each request holds a slot for `ttft_s` +
(tokens - 1) x `itl_s`, so the largest rate it can carry is slots over that.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ridgeline.errors import BadInput
from ridgeline.measure.mock.script import ScriptedPart, tail


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; `slots` None: as many at once as come."""

    ttft_s: float = 0.05
    itl_s: float = 0.01
    per_chunk: int = 1
    slots: int | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            if not getattr(self, name) >= 0:
                raise BadInput(f"the pace's {name} must not be negative", value=getattr(self, name))
        if self.per_chunk < 1:
            raise BadInput("a chunk holds a token at least", value=self.per_chunk, limit=">= 1")
        if self.slots is not None and self.slots < 1:
            raise BadInput("a server needs a slot", value=self.slots, limit=">= 1")

    def parts(self, num_tokens: int) -> Iterator[ScriptedPart]:
        """The stream of one answer of `num_tokens`."""
        sent, at_s = 0, self.ttft_s
        while sent < num_tokens:
            count = min(self.per_chunk if sent else 1, num_tokens - sent)
            at_s += count * self.itl_s if sent else 0.0
            sent += count
            yield ScriptedPart(at_s=at_s, kind="text", text="ab " * count, tokens=count)
        yield from tail(at_s, num_tokens)
