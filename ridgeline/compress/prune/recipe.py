"""What to remove from a model: the user's choices, validated once."""

from __future__ import annotations

from typing import Literal

import msgspec

from ridgeline.errors import BadInput

Importance = Literal["wanda", "taylor", "magnitude"]
MaskMethod = Literal["magnitude", "wanda", "sparsegpt"]
Pattern = Literal["unstructured", "2:4"]
CHANNEL_STEP = 32
"""Channels are removed so that a multiple of this many remain: kernels and groups divide by it."""


class PruneRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """A pruning recipe.

    Structured: `drop_layers` whole layers, `drop_channels` (a share) of the feed-forward channels
    and `drop_kv_heads` KV heads of every layer, each with the query heads that read it, chosen by
    `importance`. With `compensate` the weights that remain take over what calibration text predicts
    of those removed. Masks: `sparsity` (a share) of the weights of every layer become zero, chosen
    by `method` in the given `pattern`.

    Calibration reads `num_windows` windows of `window_tokens` tokens, drawn by `seed`. `damping`:
    share of the mean diagonal added to a Hessian.
    """

    drop_layers: int = 0
    drop_channels: float = 0.0
    drop_kv_heads: int = 0
    importance: Importance = "wanda"
    compensate: bool = True
    sparsity: float = 0.0
    pattern: Pattern = "unstructured"
    method: MaskMethod = "wanda"
    num_windows: int = 64
    window_tokens: int = 256
    seed: int = 0
    damping: float = 0.01

    @property
    def is_structured(self) -> bool:
        """Whether channels or heads are removed within layers."""
        return self.drop_channels > 0 or self.drop_kv_heads > 0

    @property
    def needs_moments(self) -> bool:
        """Whether masks use the correlations of inputs."""
        return self.method == "sparsegpt"


def check(recipe: PruneRecipe) -> PruneRecipe:
    """The recipe itself. Raises BadInput if it removes nothing or contradicts itself."""
    if not (recipe.drop_layers or recipe.is_structured or recipe.sparsity):
        raise BadInput(
            "nothing to remove",
            fix="give --drop-layers, --drop-channels, --drop-kv-heads or --sparsity",
        )
    if not 0 <= recipe.drop_channels < 1 or not 0 <= recipe.sparsity < 1:
        raise BadInput(
            "a share of all weights cannot be removed",
            value=max(recipe.drop_channels, recipe.sparsity),
            limit="at least 0, less than 1",
        )
    if recipe.pattern == "2:4" and recipe.sparsity != 0.5:
        raise BadInput("2:4 removes half of the weights", value=recipe.sparsity)
    if recipe.num_windows < 1 or recipe.window_tokens < 8:
        windows = f"{recipe.num_windows} windows of {recipe.window_tokens} tokens"
        raise BadInput("too little to calibrate on", value=windows, limit=">= 1 of >= 8")
    return recipe


def parse_sparsity(text: str | None) -> tuple[float, Pattern]:
    """The share and the pattern that "2:4" or "0.5" mean; None: no masks. Raises BadInput."""
    if text is None:
        return 0.0, "unstructured"
    if text == "2:4":
        return 0.5, "2:4"
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise BadInput(
            "unknown sparsity",
            value=text,
            limit="2:4, or a share above 0 and below 1",
            fix="use 2:4",
        )
    return share, "unstructured"
