"""How to quantise a model: the user's choices, validated once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec
from msgspec.structs import replace

from ridgeline.errors import BadInput
from ridgeline.modelspec.format import INT8, Format, int4

Method = Literal["rtn", "hqq", "gptq", "awq", "smoothquant", "llm-int8", "qat"]
METHODS: tuple[Method, ...] = ("rtn", "hqq", "gptq", "awq", "smoothquant", "llm-int8", "qat")
GROUPS = (32, 64, 128)
Numbers = Literal["int", "q4_k", "q6_k", "nf4", "fp8-tensor", "fp8-channel", "fp8-block"]
NUMBERS: tuple[Numbers, ...] = (
    "int",
    "q4_k",
    "q6_k",
    "nf4",
    "fp8-tensor",
    "fp8-channel",
    "fp8-block",
)
WINDOWS = 64
WINDOWS_OF: Mapping[str, int] = MappingProxyType({"awq": 32})
"""Default number of calibration windows by method; AWQ needs fewer than the others."""
_BITS = {"q4_k": 4, "q6_k": 6, "nf4": 4, "fp8-tensor": 8, "fp8-channel": 8, "fp8-block": 8}
_LATTICES = ("int", "q4_k", "q6_k")


class QuantizeRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """A quantisation recipe.

    `bits` per weight; `group_size` inputs share a scale (None at 8 bits: the whole row). `numbers`:
    integers with scales ("int"), or another layout (`compress.formats.coded`) that fixes bits and
    groups. `widths`: bits of individual weights, by "layer.key". `zeros`: a zero-point per group.
    `damping`: share of the mean diagonal added to a Hessian. `repair`: share of earlier layers'
    error that weights compensate. `scale_bits`: significant bits of a scale (fp16: 11, bfloat16:
    8), whatever type stores it. `steps` of training, if any. `threshold`: inputs exceeding it in
    magnitude are kept separate (llm-int8; 6 in the paper). Calibration reads `num_windows` windows
    of `window_tokens` tokens, drawn by `seed`; None is resolved by `check` to the method's default.
    """

    method: Method = "rtn"
    bits: int = 4
    group_size: int | None = 128
    zeros: bool = False
    numbers: Numbers = "int"
    widths: dict[str, int] = {}
    act_order: bool = True
    damping: float = 0.01
    repair: float = 0.5
    rotate: bool = False
    num_windows: int | None = None
    window_tokens: int = 256
    seed: int = 0
    scale_bits: int = 11
    steps: int = 200
    threshold: float = 6.0

    @property
    def calibrated(self) -> bool:
        """Whether the method reads text."""
        return self.method not in ("rtn", "hqq")

    @property
    def compared(self) -> bool:
        """Whether the method uses input correlations and the original model's inputs."""
        return self.method in ("gptq", "awq", "qat")

    def group(self, num_in: int) -> int:
        """Number of inputs that share a scale, in a row of `num_in`."""
        return self.group_size or num_in

    def at(self, key: str, layer: int | None, num_in: int) -> QuantizeRecipe:
        """The recipe of one weight: its own bits, and a fallback where K-quants do not fit: blocks
        of 256 inputs that do not divide a row, or of which a head of a delta net is a part.
        """
        if self.numbers in ("q4_k", "q6_k") and (num_in % 256 or key == "delta_o"):
            if self.numbers == "q4_k":
                return replace(self, numbers="int", bits=5, group_size=32, zeros=False)
            return replace(self, numbers="int", bits=8, group_size=None, zeros=False)
        bits = self.widths.get(f"{layer}.{key}", self.bits)
        if bits == self.bits:
            return self
        wide = bits == 8
        return replace(
            self,
            bits=bits,
            group_size=None if wide else self.group_size or 128,
            zeros=self.zeros and not wide,
        )

    def format(self) -> Format:
        """The storage format of the packed form. 3 bits are stored as nibbles: no kernel has
        anything smaller.
        """
        return INT8 if self.bits == 8 else int4(self.group_size or 128, zeros=self.zeros)


def check(recipe: QuantizeRecipe) -> QuantizeRecipe:
    """Resolve and validate the recipe. Raises BadInput if its parts contradict each other."""
    if recipe.numbers != "int":
        recipe = _check_numbers(recipe)
        return _check_windows(recipe)
    if recipe.bits == 8 and (recipe.group_size is not None or recipe.zeros):
        raise BadInput("groups and zero-points are for 3 and 4 bits", value="--bits 8")
    if recipe.bits == 8 and recipe.method in ("hqq", "qat"):
        raise BadInput(
            f"{recipe.method} is for 3 and 4 bits", value="--bits 8", fix="use --method rtn"
        )
    if recipe.bits not in (3, 4, 5, 8):
        raise BadInput("unsupported bit width", value=recipe.bits, limit="3, 4, 5, 8")
    if recipe.bits != 8 and recipe.group_size not in GROUPS:
        raise BadInput("unsupported group size", value=recipe.group_size, limit="32, 64, 128")
    if recipe.method in ("smoothquant", "llm-int8") and recipe.bits != 8:
        raise BadInput(
            f"{recipe.method} quantises weights and activations to 8 bits",
            value=f"--bits {recipe.bits}",
            fix="use --bits 8, or --method awq",
        )
    if recipe.method == "llm-int8" and not recipe.threshold > 0:
        raise BadInput("no magnitude", value=recipe.threshold, limit="more than 0")
    return _check_windows(recipe)


def _check_numbers(recipe: QuantizeRecipe) -> QuantizeRecipe:
    """Layouts other than integers fix bits and groups."""
    known = ("rtn", "gptq", "awq") if recipe.numbers in _LATTICES else ("rtn",)
    if recipe.method not in known:
        raise BadInput(
            f"{recipe.numbers} is not made by --method {recipe.method}",
            limit=", ".join(known),
        )
    if recipe.zeros:
        raise BadInput(f"{recipe.numbers} has no choice of zero-points", value="--asym")
    return replace(recipe, bits=_BITS[recipe.numbers], group_size=None)


def _check_windows(recipe: QuantizeRecipe) -> QuantizeRecipe:
    num_windows = recipe.num_windows
    if num_windows is None:
        num_windows = WINDOWS_OF.get(recipe.method, WINDOWS)
    if num_windows < 1 or recipe.window_tokens < 8:
        asked = f"{num_windows} windows of {recipe.window_tokens} tokens"
        raise BadInput("too little to calibrate on", value=asked, limit=">= 1 of >= 8")
    if recipe.steps < 1:
        raise BadInput("too few steps to train", value=recipe.steps, limit=">= 1")
    return replace(recipe, num_windows=num_windows)
