"""Trees of drafts: several candidates per position, verified in one step.

  [(0,), (0, 0), (0, 1), (1,), (1, 0)]      a node is the ranks on its path: (1, 0) is the most
                                            likely token after the second most likely one
    root ── 0 ── 0        leaves (0, 0), (0, 1), (1, 0): three chains of two tokens;
         │    └─ 1        the first is the trunk
         └─ 1 ── 0

Where the first candidate of a position is wrong, the second is often right: a tree contains both,
and continuations of each. It is verified by walking down (greedy and seeded requests:
`exact_match`), or, if candidates were sampled, by rejection at each node, child after child
(`rejection_sampling`).

Source: SpecInfer (Miao et al. 2023, arXiv 2305.09781), Medusa (Cai et al. 2024, arXiv 2401.10774);
the notation is that of vLLM's `speculative_token_tree`.

Invariants: greedy and seeded tokens equal plain decoding, other requests keep their distribution.
When it loses: every leaf is a separate chain in the step, so shared prefixes are computed for
each. A tree pays where rows are nearly free because the step is bound by bandwidth: one sequence,
large weights. Its size is fixed: no controller decides on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ridgeline.engine.sampling.verify.rejection_sampling import TreePath
from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.scheduler.speculation.base import DraftContext, DraftOutcome, StepCapacity
from ridgeline.errors import BadInput

MOST_LEAVES, MOST_WIDE = 32, 10
_NODE = r"\(\s*\d+\s*(?:,\s*\d+\s*)*,?\s*\)"
_TREE = re.compile(rf"\s*\[\s*{_NODE}\s*(?:,\s*{_NODE}\s*)*,?\s*\]\s*")


class TokenTree(NamedTuple):
    """The leaves, trunk first: chains of ranks."""

    leaves: tuple[TreePath, ...]

    @property
    def depth(self) -> int:
        return max(len(leaf) for leaf in self.leaves)

    @property
    def widths(self) -> list[int]:
        """Number of candidates wanted per position."""
        places = range(self.depth)
        return [1 + max(leaf[i] for leaf in self.leaves if len(leaf) > i) for i in places]

    @property
    def size(self) -> int:
        """Number of candidates of all positions."""
        return sum(self.widths)

    def within(self, most: int, found: Sequence[int]) -> tuple[TreePath, ...]:
        """Its leaves if at most `most` tokens may be drafted and position i has `found[i]`
        candidates.
        """
        cut: dict[TreePath, None] = {}
        for leaf in self.leaves:
            there = [rank < num for rank, num in zip(leaf, found, strict=False)]
            num = there.index(False) if False in there else len(there)
            cut[leaf[: min(num, most)]] = None
        return tuple(leaf for leaf in cut if leaf and not _goes_on(leaf, cut))


def parse_tree(text: str) -> TokenTree:
    """Parse the notation. Raises BadInput if a node's parent or elder sibling is missing."""
    if not _TREE.fullmatch(text):
        raise BadInput(
            "speculative_token_tree is not a list of nodes",
            value=text[:80],
            limit='such as "[(0,), (0, 0), (1,)]"',
        )
    nodes = {
        tuple(int(rank) for rank in re.findall(r"\d+", node)) for node in re.findall(_NODE, text)
    }
    for node in sorted(nodes):
        head, rank = node[:-1], node[-1]
        for before in (head, (*head, rank - 1)) if rank else (head,):
            if before and before not in nodes:
                raise BadInput(
                    "a node of speculative_token_tree hangs in the air",
                    value=str(node),
                    fix=f"add {before}",
                )
        if rank >= MOST_WIDE:
            raise BadInput("too wide a tree", value=str(node), limit=f"ranks below {MOST_WIDE}")
    leaves = tuple(sorted(node for node in nodes if not _goes_on(node, nodes)))
    if len(leaves) > MOST_LEAVES:
        raise BadInput("too many leaves", value=len(leaves), limit=MOST_LEAVES)
    return TokenTree(leaves)


def _goes_on(node: TreePath, nodes: Mapping[TreePath, None] | set[TreePath]) -> bool:
    return any(len(other) > len(node) and other[: len(node)] == node for other in nodes)


class TreeDrafter(Protocol):
    """A drafter that drafts trees."""

    def trees(
        self, contexts: Sequence[DraftContext], tree: TokenTree
    ) -> list[list[tuple[int, ...]]]:
        """Per entry the chains of its leaves, trunk first, each of at most `most` tokens; none
        without a draft.
        """
        ...

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None: ...


class FixedTree:
    """Every sequence drafts the same tree in every step, as far as there is room."""

    def __init__(self, drafter: TreeDrafter, tree: TokenTree) -> None:
        self._drafter, self._tree = drafter, tree
        self._others: dict[int, list[tuple[int, ...]]] = {}

    def should_propose(self, runs: Sequence[Run]) -> bool:
        return True

    def propose(
        self, contexts: Sequence[DraftContext], room: StepCapacity
    ) -> list[tuple[int, ...]]:
        found = self._drafter.trees(contexts, self._tree)
        self._others = {
            context.seq_id: own[1:] for context, own in zip(contexts, found, strict=True)
        }
        return [own[0] if own else () for own in found]

    def alternatives(self, seq_id: int) -> Sequence[tuple[int, ...]]:
        return self._others.get(seq_id, ())

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        self._others = {}

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self._drafter.forget(seq_id, tokens, tenant)

    def counters(self) -> dict[str, float]:
        return {}
