"""Options of the commands that make a model smaller: prune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ridgeline.config import shared
from ridgeline.config.option import About, Section
from ridgeline.config.units import (
    COUNT,
    NON_NEGATIVE_COUNT,
    SHARE,
    TOKENS,
    Range,
)

OUTPUT = About(
    "Empty folder for the result.", short="-o", path="folder", required=True, ambient=False
)
CALIBRATION_TEXT = About("Text to measure activations on.", path="input", unset="built-in text")


class PruneFiles(Section, frozen=True, kw_only=True):
    """The model to prune, and where the result goes."""

    title: ClassVar[str] = "Files"

    model: Annotated[str, shared.MODEL]
    output: Annotated[Path, OUTPUT]


class PruneOptions(Section, frozen=True, kw_only=True):
    """What is removed from a model, and how it is chosen."""

    title: ClassVar[str] = "Pruning"
    table: ClassVar[str] = "prune"
    prefix: ClassVar[str] = "prune_"

    drop_layers: Annotated[
        int,
        About(
            "Layers to remove: those that turn their input least.",
            unit=COUNT,
            range=NON_NEGATIVE_COUNT,
            since="0.3",
        ),
    ] = 0
    drop_channels: Annotated[
        float,
        About("Share of the feed-forward channels to remove.", unit=SHARE, since="0.3"),
    ] = 0.0
    drop_kv_heads: Annotated[
        int,
        About(
            "KV heads to remove from every layer, with their query heads.",
            unit=COUNT,
            range=NON_NEGATIVE_COUNT,
            since="0.3",
        ),
    ] = 0
    importance: Annotated[
        Literal["wanda", "taylor", "magnitude"],
        About(
            "How channels and heads are chosen: by weights and inputs, by the loss's slope (holds "
            "the whole model), or by weights alone.",
            since="0.3",
        ),
    ] = "wanda"
    compensate: Annotated[
        bool,
        About(
            "Let remaining channels and heads take over what text predicts of those removed.",
            since="0.3",
        ),
    ] = True
    sparsity: Annotated[
        str | None,
        About(
            "Zero single weights: a share such as 0.5, or 2:4 (two in every four).",
            metavar="SHARE",
            since="0.3",
        ),
    ] = None
    method: Annotated[
        Literal["magnitude", "wanda", "sparsegpt"],
        About("How single weights are chosen; sparsegpt corrects the others.", since="0.3"),
    ] = "wanda"
    format: Annotated[
        Literal["dense", "sparse-24"],
        About(
            "dense: zeros are stored; sparse-24: 2:4 weights compressed (compressed-tensors).",
            since="0.3",
        ),
    ] = "dense"
    calibration_text: Annotated[Path | None, CALIBRATION_TEXT.but(since="0.3")] = None
    calibration_windows: Annotated[
        int, About("Windows of text to read.", unit=COUNT, since="0.3")
    ] = 64
    calibration_tokens: Annotated[
        int, About("Tokens per window.", unit=TOKENS, range=Range(8, 65_536), since="0.3")
    ] = 256
    seed: Annotated[int, shared.SEED_OF_ALL.but(help="Seed of the windows.", since="0.3")] = 0
