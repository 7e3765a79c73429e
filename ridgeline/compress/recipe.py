"""How a model is to be quantised: the user's choices, validated once, and the fingerprint of a
run."""

from __future__ import annotations

from typing import Literal

import msgspec

from ridgeline.errors import BadInput
from ridgeline.spec.format import INT8, Format, int4

Method = Literal["rtn", "hqq", "gptq", "awq", "smoothquant"]
METHODS: tuple[Method, ...] = ("rtn", "hqq", "gptq", "awq", "smoothquant")
GROUPS = (32, 64, 128)


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """`bits` per weight; `group_size` inputs share a scale (None at 8 bits: the whole row).

    `zeros`: a zero-point per group. `damping`: share of the mean diagonal added to GPTQ's Hessian.
    `scale_bits`: significant bits of a scale (fp16: 11, bfloat16: 8), whatever holds it in the end.
    Calibration reads `num_windows` pieces of `window_tokens` tokens, drawn by `seed`.
    """

    method: Method = "rtn"
    bits: int = 4
    group_size: int | None = 128
    zeros: bool = False
    act_order: bool = True
    damping: float = 0.01
    rotate: bool = False
    num_windows: int = 64
    window_tokens: int = 256
    seed: int = 0
    scale_bits: int = 11

    @property
    def calibrated(self) -> bool:
        """Does it read text?"""
        return self.method in ("gptq", "awq", "smoothquant")

    def group(self, num_in: int) -> int:
        """Inputs that share a scale, of a row of `num_in`."""
        return self.group_size or num_in

    def format(self) -> Format:
        """How the packed form stores it: 3 bits lie in nibbles, no kernel has a narrower place."""
        return INT8 if self.bits == 8 else int4(self.group_size or 128, zeros=self.zeros)


def check(recipe: Recipe) -> Recipe:
    """The recipe; BadInput where its parts contradict each other."""
    if recipe.bits == 8 and (recipe.group_size is not None or recipe.zeros):
        raise BadInput("groups and zero-points are for 3 and 4 bits", value="--bits 8")
    if recipe.bits == 8 and recipe.method == "hqq":
        raise BadInput("hqq is for 3 and 4 bits", value="--bits 8", fix="use --method rtn")
    if recipe.bits not in (3, 4, 8):
        raise BadInput("no grid of so many bits", value=recipe.bits, limit="3, 4, 8")
    if recipe.bits != 8 and recipe.group_size not in GROUPS:
        raise BadInput("no such group size", value=recipe.group_size, limit="32, 64, 128")
    if recipe.method == "smoothquant" and recipe.bits != 8:
        raise BadInput(
            "smoothquant balances 8-bit activations against 8-bit weights",
            value=f"--bits {recipe.bits}",
            fix="use --bits 8, or --method awq",
        )
    if recipe.num_windows < 1 or recipe.window_tokens < 8:
        raise BadInput("too little to calibrate on", value=recipe.num_windows)
    return recipe
