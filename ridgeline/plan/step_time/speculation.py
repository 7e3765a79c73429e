"""The cost and yield of speculative decoding in predictions.

A step verifies γ draft tokens after each sequence's last token: it computes γ + 1 rows of each. If
each draft is accepted independently with probability α (Leviathan et al. 2023), a step yields

    E = 1 + α + α² + … + α^γ = (1 - α^(γ+1)) / (1 - α)

tokens per sequence on average. In a tree of drafts, the candidate of rank r at a position is right
with α (1 - α)^r, so that E is 1 and the sum of the product of these over each node's path; each
leaf's chain is computed by itself, with the token that all begin behind. Heads accepted with 0.17
and 0.14 (benchmarks/results/draft-trees.json) yield by this formula 1.31 and 1.26 tokens per step
with two candidates of one draft, measured 1.30 and 1.26, and with a tree of six nodes 1.49 and
1.41, measured 1.42 and 1.37.

What drafts cost before they are verified depends on the drafter:

    lookup (ngram, suffix, predicted outputs)    nothing on the device
    lookahead        nothing, but the last places of a draft are still guesses under iteration
    a draft model    γ of its decode steps
    self             γ steps of the model without some of its layers
    eagle            γ steps of one layer and the LM head
    medusa           one product with γ matrices [hidden, hidden] and the LM head of γ rows
    auto             a draft model's steps for the sequences in which a lookup finds nothing

Speculation stops paying once steps are bound by arithmetic rather than by weight bandwidth: with
`adaptive` depth, each batch size gets the depth of the least time per token, none among them. The
acceptance rate depends on the workload and should be measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from ridgeline.config.settings import MAX_DRAFT_TOKENS, Speculative
from ridgeline.errors import BadInput
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.serving_formats import parse_weight_dtype
from ridgeline.modelspec.cost.step import RunGroup
from ridgeline.modelspec.model import ModelSpec
from ridgeline.plan.step_time.replica import Replica, StepCost, build_replica

DEPTH = 8
"""Drafts at most where the depth is not fixed: more were never chosen in the benchmarks."""
WINDOW = 3
"""Last places of a lookahead draft, which are left to the iteration
(ridgeline/engine/speculate/drafters/lookahead.py)."""
KEPT = 0.5
"""Of the layers, in self-speculation: Draft & Verify (arXiv 2309.08168) skips about half."""
_NODE = re.compile(r"\(([\d\s,]+)\)")
_USUAL_CONTEXT = 1024  # tokens of a sequence, at which the depth of a batch size is chosen


class VerifyingStep(NamedTuple):
    """Runs of a step that verifies drafts, how many positions it samples, and its weight in a
    mean over steps."""

    weight: float
    groups: tuple[RunGroup, ...]
    num_sampled: int


class SpeculationModel(msgspec.Struct, frozen=True, kw_only=True):
    """`num_tokens` is γ, `acceptance` α. `draft`: what makes one draft token with each of its
    steps; None: lookup, or with `heads` one pass of all heads. `tree`: the nodes of a tree of
    drafts, as the ranks on their paths; without one, drafts are a chain.

    `unsure`: last places of each draft that are never accepted. `share` of the sequences have a
    draft in a step, and `computed` of them one that the drafter has to compute. `weight_bytes` on
    one device and `kv_share` of the model's cache are what the drafter takes of the memory.
    """

    num_tokens: int
    acceptance: float
    draft: Replica | None = None
    heads: bool = False
    tree: tuple[tuple[int, ...], ...] = ()
    unsure: int = 0
    share: float = 1.0
    computed: float = 1.0
    adaptive: bool = False
    weight_bytes: float = 0.0
    kv_share: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.num_tokens <= MAX_DRAFT_TOKENS:
            raise BadInput(
                "the number of draft tokens per step is out of range",
                value=self.num_tokens,
                limit=f"1..{MAX_DRAFT_TOKENS}",
            )
        if not 0 <= self.acceptance <= 1:
            raise BadInput(
                "the acceptance rate of drafts must be a probability",
                value=self.acceptance,
                limit="0..1",
            )

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens per sequence and step."""
        alpha = self.acceptance
        if self.tree:
            nodes = [math.prod(alpha * (1 - alpha) ** rank for rank in path) for path in self.tree]
            return 1 + self.share * sum(nodes)
        depth = self.num_tokens - self.unsure
        return 1 + self.share * sum(alpha**i for i in range(1, depth + 1))

    @property
    def chain_rows(self) -> tuple[int, ...]:
        """Rows of each chain that a step computes of a sequence with a draft."""
        parents = {path[:-1] for path in self.tree}
        leaves = [path for path in self.tree if path not in parents]
        return tuple(len(leaf) + 1 for leaf in leaves) or (self.num_tokens + 1,)

    def at(self, machine: Replica, batch: int, done: int = _USUAL_CONTEXT) -> SpeculationModel:
        """The model for a batch: with a fixed depth itself, else that of the least time per token.

        `share` is 0 where no depth pays.
        """
        if not self.adaptive:
            return self
        depths = range(1 + self.unsure, self.num_tokens + 1)
        fixed = [replace(self, num_tokens=depth, adaptive=False) for depth in depths]
        none = replace(self, share=0.0, adaptive=False)
        return min((none, *fixed), key=lambda each: each.decode_s(machine, batch, done))

    def verify(self, machine: Replica, batch: int, done: int) -> StepCost:
        """The largest step that verifies drafts of `batch` sequences with `done` tokens each."""
        return machine.grouped(*self._step(math.ceil(self.share * batch), batch, done))

    def steps(self, batch: int, done: int) -> Iterator[VerifyingStep]:
        """The steps that the mean step of a batch lies between, with their weights."""
        drafted = self.share * batch
        fewer = math.floor(drafted)
        for count, weight in ((fewer, 1 - (drafted - fewer)), (fewer + 1, drafted - fewer)):
            if weight:
                yield VerifyingStep(weight, *self._step(count, batch, done))

    def _step(self, drafted: int, batch: int, done: int) -> tuple[tuple[RunGroup, ...], int]:
        chains = self.chain_rows
        groups = [(drafted, rows, done) for rows in chains] + [(batch - drafted, 1, done)]
        sampled = drafted * sum(chains) + batch - drafted
        return tuple(group for group in groups if group[0]), sampled

    def draft_s(self, machine: Replica, batch: int, done: int) -> float:
        """Seconds in which the drafts of one step are made."""
        if not self.share:
            return 0.0
        if self.heads:
            return self._heads_s(machine, batch, done)
        if self.draft is None or not self.computed:
            return 0.0
        drafted = max(1, round(self.computed * batch))
        one_s = self.draft.uniform(drafted, 1, done, sampled=drafted).seconds
        return self.num_tokens * one_s * min(1.0, self.computed * batch)

    def _heads_s(self, machine: Replica, batch: int, done: int) -> float:
        """The LM head of every head's rows, and the heads themselves as a part of one more."""

        def head_s(num_rows: int) -> float:
            with_head = machine.uniform(batch, 1, done, sampled=num_rows).busy_s
            return with_head - machine.uniform(batch, 1, done, sampled=0).busy_s

        spec = machine.spec
        own_share = self.num_tokens * spec.hidden_size / spec.vocab_size
        return head_s(batch * self.num_tokens) + own_share * head_s(batch)

    def decode_s(self, machine: Replica, batch: int, done: int) -> float:
        """Seconds per token of each sequence."""
        steps = self.steps(batch, done)
        verify_s = sum(step.weight * machine.grouped(*step[1:]).seconds for step in steps)
        return (verify_s + self.draft_s(machine, batch, done)) / self.tokens_per_step


def shortened(machine: Replica, num_layers: int) -> Replica:
    """The model with as many layers, which are spread evenly over its own, the last one among them.

    Raises UserError where the layout does not suit it.
    """
    layers = machine.spec.layers
    kept = [(i + 1) * len(layers) // num_layers - 1 for i in range(num_layers)]
    return build_replica(
        replace(machine.spec, layers=tuple(layers[i] for i in kept)),
        machine.device,
        machine.layout,
        weight_dtype=machine.weight_dtype,
        kv_dtype=machine.kv_dtype,
    )


def speculation_of(
    config: Speculative,
    acceptance: float | None,
    draft_share: float,
    machine: Replica,
    load: Callable[[str], ModelSpec] = load_planning_spec,
) -> SpeculationModel:
    """The speculation of a replica under a config. `draft_share`: of the sequences, in how many a
    step has a draft; with "auto", in how many a lookup has one.

    Raises BadInput without an acceptance, or without the draft model that the method needs.
    """
    if acceptance is None:
        raise BadInput(
            "speculation needs the acceptance rate of draft tokens",
            value=config.method,
            fix="add --acceptance: `ridgeline bench` prints drafted and accepted tokens",
        )
    tree = _tree_of(config)
    depth = max(map(len, tree), default=0)
    method = config.method
    unsure = WINDOW if method == "lookahead" else 0
    num_tokens = depth or config.num_speculative_tokens or DEPTH
    if num_tokens <= unsure:
        raise BadInput(
            "a lookahead draft needs places in front of those under iteration",
            value=num_tokens,
            limit=f"above {unsure}",
        )
    both = method == "auto" and config.model is not None
    draft = _drafter(config, machine, load)
    return SpeculationModel(
        num_tokens=num_tokens,
        acceptance=acceptance,
        draft=draft,
        heads=method == "medusa",
        tree=tree,
        unsure=unsure,
        share=1.0 if both else draft_share,
        computed=1 - draft_share if both else draft_share,
        adaptive=config.num_speculative_tokens is None and not tree,
        weight_bytes=_weight_bytes(method, num_tokens, machine, draft),
        kv_share=0.0 if method == "self" else kv_share(machine, draft),
    )


def kv_share(machine: Replica, draft: Replica | None) -> float:
    """The cache of a drafter next to the model's, per token."""
    return 0.0 if draft is None else draft.cost.kv_bytes_per_token / machine.cost.kv_bytes_per_token


def _weight_bytes(method: str, num_tokens: int, machine: Replica, draft: Replica | None) -> float:
    """Weights of the drafter on one device that the model does not have itself."""
    if method == "medusa":
        return 2 * num_tokens * machine.spec.hidden_size**2 / machine.layout.tp
    if draft is None or method == "self":
        return 0.0
    if method == "eagle":  # with the model's own embeddings and head
        return shortened(machine, 2).resident_bytes - draft.resident_bytes
    return draft.resident_bytes


def _drafter(
    config: Speculative, machine: Replica, load: Callable[[str], ModelSpec]
) -> Replica | None:
    """What makes drafts on the devices of the model, step by step; None if nothing does."""
    if config.method == "eagle":
        return shortened(machine, 1)
    if config.method == "self":
        return shortened(machine, max(1, round(KEPT * len(machine.spec.layers))))
    if config.method not in ("draft_model", "auto"):
        return None
    if config.model is None:
        if config.method == "auto":
            return None
        raise BadInput(
            "speculation by a draft model needs its name",
            value=config.method,
            fix='name it: {"method": "draft_model", "model": "llama-3.2-1b"}',
        )
    form = config.quantization
    return build_replica(
        load(config.model),
        machine.device,
        machine.layout,
        weight_dtype=None if form is None else parse_weight_dtype(form),
        kv_dtype=machine.kv_dtype,
    )


def _tree_of(config: Speculative) -> tuple[tuple[int, ...], ...]:
    """The nodes of the config's tree, as ranks on their paths; () without one. Raises BadInput."""
    if config.speculative_token_tree is None:
        return ()
    nodes = _NODE.findall(config.speculative_token_tree)
    paths = {tuple(int(rank) for rank in re.findall(r"\d+", node)) for node in nodes}
    if not paths or any(len(path) > 1 and path[:-1] not in paths for path in paths):
        raise BadInput(
            "speculative_token_tree is not a list of nodes with their parents",
            value=config.speculative_token_tree,
            limit='such as "[(0,), (0, 0), (1,)]"',
        )
    return tuple(sorted(paths))
