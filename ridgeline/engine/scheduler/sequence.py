"""The one mutable record of the engine: a sequence, and the choices of one request that it belongs
to."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ridgeline.records import Request, Sampling, TokenLogprobs, Usage

OrderKey = tuple[float, int, int]
SortKey = tuple[int, OrderKey]


class State(Enum):
    """Where a sequence is. Only a running one owns blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Known tokens (prompt and output); the first `computed` of them are in the KV cache.

    `key` orders sequences: lower goes first, lane by lane (see `queue.py`, `lanes.py`). `blocks` is
    the block table: position p lives in blocks[p // block_size]. `digests` is the hash chain over
    full blocks as far as it has been needed; the first `num_published` blocks have been offered to
    the prefix cache.
    `num_prompt_logprobs`: how many alternatives per prompt position are still wanted (None: none).
    """

    id: int
    group: SequenceGroup
    index: int
    seed: int
    key: SortKey
    tokens: list[int]
    num_prompt: int
    computed: int = 0
    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_prompt_logprobs: int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    request: Request = field(init=False)  # this and what follows: asked for at every token
    sampling: Sampling = field(init=False)
    has_history: bool = field(init=False)
    is_argmax: bool = field(init=False)

    def __post_init__(self) -> None:
        self.request = self.group.request
        self.sampling = self.request.sampling
        self.has_history = self.sampling.has_history
        self.is_argmax = self.sampling.takes_first_largest

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def pending(self) -> int:
        """Known tokens that are not computed yet; at least one while the sequence lives."""
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Those of the whole prompt, for the first token; nothing predicts the prompt's first
        token."""
        if self.num_prompt_logprobs is None:
            return None
        taken, self.prompt_logprobs = (None, *self.prompt_logprobs), []
        self.num_prompt_logprobs = None
        return taken

    def forget_computed(self) -> None:
        """Back to nothing computed; what was generated stays known and is recomputed as prompt."""
        self.computed = self.num_published = 0
        self.prompt_logprobs.clear()


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences of one request. Choice 0 computes the prompt; those in `unforked` wait for it.

    `seed` is the request's; every choice derives its own from it. `live` holds unfinished sequences by
    choice. `started` turns true when the request gets its first seat.
    """

    request: Request
    serial: int
    seed: int
    live: dict[int, Sequence] = field(default_factory=dict)
    unforked: list[int] = field(default_factory=list)
    next_index: int = 0
    started: bool = False
    cached_tokens: int = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.live) + len(self.unforked)

    def usage(self, num_output: int) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=num_output,
        )

    def source_for(self, seq: Sequence) -> Sequence | None:
        """A running sibling that holds the computed prompt which `seq` still has to begin from."""
        if seq.num_output:
            return None
        for other in self.live.values():
            if other.state is State.RUNNING and other.computed >= seq.num_prompt:
                return other
        return None
