"""Sequences, the engine's one mutable record, grouped by the request they belong to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

import msgspec

from ridgeline.engine.scheduler.beam_search import BeamState
from ridgeline.engine.scheduler.kv.eviction import SequenceEviction
from ridgeline.records import Request, Sampling, TokenLogprobs, Usage

OrderKey = tuple[float, int, int]
SortKey = tuple[int, OrderKey]  # lane rank, then the order within the lane


class State(Enum):
    """Only a running sequence has a slot and owns blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Known tokens (prompt and output), of which the first `num_computed` are in the KV cache.

    `key` orders sequences, lowest first, lane by lane. `blocks` is the block table: position p
    lives in blocks[p // block_size]. `windows` are the block tables of the groups of layers with a
    window (`KvLayout`), without the blocks that they have given back: position p lives in
    windows[j][p // block_size - first_place]. With `eviction`, `num_dropped` tokens have left the
    cache: a position p behind them lives in blocks[(p - num_dropped) // block_size]. `digests` is
    the hash chain over full blocks, as far as it has been needed; the first `num_published` blocks
    have been offered to the prefix cache. `state_slot` is unique among the running sequences.
    `num_prompt_logprobs` is the number of alternatives to report per prompt position; None if none
    are due (any more). `num_predicted` and `num_mispredicted` count drafts from the request's
    prediction that were accepted and rejected.
    A `held` beam has its continuations, and waits for those of the request's other beams; its last
    token will be replaced by the one that lives on.
    """

    id: int
    group: SequenceGroup
    index: int
    seed: int
    key: SortKey
    tokens: list[int]
    num_prompt: int
    num_computed: int = 0
    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    windows: list[list[int]] = field(default_factory=list)
    first_place: int = 0
    eviction: SequenceEviction | None = None
    num_dropped: int = 0
    digests: list[bytes] = field(default_factory=list)
    num_published: int = 0
    state_slot: int = 0
    num_prompt_logprobs: int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_predicted: int = 0
    num_mispredicted: int = 0
    held: bool = False
    # Copies of what every token needs, to save the lookups.
    request: Request = field(init=False)
    sampling: Sampling = field(init=False)
    has_history: bool = field(init=False)
    is_argmax: bool = field(init=False)
    has_token_rules: bool = field(init=False)

    def __post_init__(self) -> None:
        self.request = self.group.request
        self.sampling = self.request.sampling
        self.has_history = self.sampling.has_history
        self.is_argmax = self.sampling.is_plain_greedy
        self.has_token_rules = self.sampling.has_token_rules

    @property
    def num_known(self) -> int:
        return len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Known tokens that are not computed yet: at least one until the sequence finishes."""
        return len(self.tokens) - self.num_computed

    @property
    def num_publishable(self) -> int:
        """Computed tokens that others may find: with the keys and values of a full cache."""
        policy, num = self.request.cache, self.num_computed
        if policy is not None and policy.max_cached_tokens is not None:
            num = min(num, policy.max_cached_tokens)
        return num if self.eviction is None else int(min(num, self.eviction.exact_tokens))

    @property
    def max_hit_tokens(self) -> int:
        """The most known tokens that a prefix hit may supply: the last one has to be computed."""
        if self.eviction is None:
            return len(self.tokens) - 1
        return int(min(len(self.tokens) - 1, self.eviction.max_hit_tokens))

    @property
    def next_drop(self) -> float:
        """The position up to which the next run may go; inf where nothing limits it."""
        return math.inf if self.eviction is None else self.eviction.next_drop(self.num_computed)

    @property
    def num_feedable(self) -> int:
        """Pending tokens that one run may feed."""
        if self.eviction is None:
            return len(self.tokens) - self.num_computed
        return int(min(len(self.tokens), self.next_drop)) - self.num_computed

    @property
    def all_blocks(self) -> list[int]:
        """The blocks of every table."""
        return [*self.blocks, *chain.from_iterable(self.windows)]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def usage(self) -> Usage:
        """Token counts of this choice."""
        usage = self.group.usage(self.num_output)
        if not self.request.prediction:
            return usage
        return msgspec.structs.replace(
            usage,
            accepted_prediction_tokens=self.num_predicted,
            rejected_prediction_tokens=self.num_mispredicted,
        )

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Log-probabilities of the whole prompt, to be delivered once, with the first token.

        The first entry is None: nothing predicts the prompt's first token.
        """
        if self.num_prompt_logprobs is None:
            return None
        taken, self.prompt_logprobs = (None, *self.prompt_logprobs), []
        self.num_prompt_logprobs = None
        return taken

    def reset_computed(self) -> None:
        """Discard what was computed; generated tokens stay known, and are computed again."""
        self.num_computed = self.num_published = self.num_dropped = 0
        self.prompt_logprobs.clear()


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences of one request, one per choice.

    Choice 0 computes the prompt; the indices in `unforked` are forked from it afterwards. `live`
    holds the unfinished sequences by choice index. `started` becomes true with the request's first
    slot. Every choice derives its seed from `seed`. `order_s` replaces the place in the order that
    arrival and priority give the request, once it has overtaken others. With `beams`, the choices
    are the beams of a search.
    """

    request: Request
    serial: int
    seed: int
    live: dict[int, Sequence] = field(default_factory=dict)
    unforked: list[int] = field(default_factory=list)
    next_index: int = 0
    started: bool = False
    cached_tokens: int = 0
    pinned_tokens: int = 0
    order_s: float | None = None
    beams: BeamState | None = None

    @property
    def num_unfinished(self) -> int:
        return len(self.live) + len(self.unforked)

    def usage(self, num_output: int) -> Usage:
        """Token counts for a choice that ends with `num_output` tokens."""
        return Usage(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=num_output,
        )

    def find_computed_prompt(self, seq: Sequence) -> Sequence | None:
        """A running sibling that holds the computed prompt which `seq` has yet to start from."""
        if seq.num_output:
            return None
        for other in self.live.values():
            if other.state is State.RUNNING and other.num_computed >= seq.num_prompt:
                return other
        return None


def prompt_of(request: Request) -> Sequence:
    """The prompt of a request that is not served: for what the prefix cache keeps of it."""
    prompt = list(request.prompt)
    group = SequenceGroup(request, -1, 0)
    return Sequence(-1, group, 0, 0, (0, (0.0, 0, 0)), prompt, len(prompt))
