"""Attention of models whose layers have block tables in groups (`KvLayout`).

A layer with a window sees the last W positions, and no score depends on where the sequence began:
keys are rotated before they are cached. So the runs of a windowed group can be numbered from the
first block that the group still has, and every backend computes them as if they were short
sequences. Chunks (Llama 4) are counted from position 0, so a group with chunks gives blocks back in
multiples of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor

from ridgeline.engine.attention.base import Attend, Attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.latent import LatentUp
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.cost.kv_layout import KvLayout
from ridgeline.modelspec.model import ModelSpec


class GroupedAttention:
    """One backend per group of layers, each built on the group's layers alone."""

    def __init__(
        self, backend: Callable[[ModelSpec, KvCache], Attention], spec: ModelSpec, cache: KvCache
    ) -> None:
        layout, self.backend, self.block_size = cache.layout, backend, cache.block_size
        self.num_full = int(bool(layout.full))
        self.group_of = tuple(map(layout.group_of, range(len(spec.layers))))
        self.groups = tuple(
            backend(_uniform(spec, layout, group), cache) for group in range(layout.num_groups)
        )

    def runs_of(self, runs: Sequence[Run]) -> list[Sequence[Run]]:
        """The runs as each group sees them."""
        num_windowed = len(self.groups) - self.num_full
        windowed = [
            [windowed_run(run, j, self.block_size) for run in runs] for j in range(num_windowed)
        ]
        return [*[runs] * self.num_full, *windowed]

    def prepare(self, runs: Sequence[Run]) -> GroupedStep:
        each = zip(self.groups, self.runs_of(runs), strict=True)
        return GroupedStep(self.group_of, tuple(inner.prepare(own) for inner, own in each))


class GroupedStep:
    """The `Attend` of one step: each layer uses that of its group."""

    def __init__(self, group_of: tuple[int, ...], steps: tuple[Attend, ...]) -> None:
        self.group_of, self.steps = group_of, steps

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        return self.steps[self.group_of[layer]](q_THD, kv_T2KD, layer, sinks_H)

    def attend_latent(self, q_THD: Tensor, rows_TW: Tensor, layer: int, up: LatentUp) -> Tensor:
        """Attention over latent rows, by the backend of the layer's group."""
        return self.steps[self.group_of[layer]].attend_latent(  # type: ignore[attr-defined,no-any-return]
            q_THD, rows_TW, layer, up
        )


def windowed_run(run: Run, j: int, block_size: int) -> Run:
    """The run as the windowed group `j` sees it: position 0 is its first block's."""
    start, blocks = run.start - run.first_place * block_size, run.windows[j]
    return msgspec.structs.replace(run, start=start, blocks=blocks, windows=(), first_place=0)


def _uniform(spec: ModelSpec, layout: KvLayout, group: int) -> ModelSpec:
    """The spec with every layer outside the group replaced by one within it.

    A backend prepares what its kinds of layers need, and these are then the group's only.
    """
    own = [i for i in layout.groups[group] if i in range(len(spec.layers))]
    if not own:
        return spec
    stand_in = spec.layers[own[0]]
    layers = [layer if i in own else stand_in for i, layer in enumerate(spec.layers)]
    return msgspec.structs.replace(spec, layers=tuple(layers))
