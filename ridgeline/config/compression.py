"""Options of the commands that make a model smaller: prune, distill."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ridgeline.config import shared
from ridgeline.config.option import About, Section
from ridgeline.config.units import (
    COUNT,
    MAX_COUNT,
    NON_NEGATIVE_COUNT,
    NUMBER,
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
    json: Annotated[bool, shared.JSON.but(panel="Output", since="0.3")] = False


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


class DistillFiles(Section, frozen=True, kw_only=True):
    """Teacher, student, and where the trained student goes."""

    title: ClassVar[str] = "Files"

    teacher: Annotated[
        str | None,
        About(
            "Model to learn from.",
            metavar="MODEL",
            unset="the source of --from-pruned",
            ambient=False,
            since="0.3",
        ),
    ] = None
    student: Annotated[
        str | None, About("Model to train.", metavar="MODEL", ambient=False, since="0.3")
    ] = None
    from_pruned: Annotated[
        Path | None,
        About(
            "Folder of ridgeline prune: its model is the student.",
            path="input",
            metavar="FOLDER",
            ambient=False,
            since="0.3",
        ),
    ] = None
    output: Annotated[Path, OUTPUT.but(since="0.3")]
    json: Annotated[bool, shared.JSON.but(panel="Output", since="0.3")] = False


class DistillOptions(Section, frozen=True, kw_only=True):
    """How a student learns from a teacher."""

    title: ClassVar[str] = "Distillation"
    table: ClassVar[str] = "distill"
    prefix: ClassVar[str] = "distill_"

    objective: Annotated[
        Literal["logits", "sequence"],
        About(
            "logits: the teacher's distribution at every token; sequence: the text that the "
            "teacher writes.",
            since="0.3",
        ),
    ] = "logits"
    top_k: Annotated[
        int,
        About(
            "logits: most likely tokens of the teacher that are stored; the rest counts as one.",
            unit=COUNT,
            range=Range(1, 65_536),
            unset="64",
            since="0.3",
        ),
    ] = 64
    text: Annotated[
        Path | None,
        About("Text to train on.", path="input", unset="built-in text", since="0.3"),
    ] = None
    own_tokens: Annotated[
        int | None,
        About(
            "Tokens generated by the teacher to train on in addition; sequence trains on these "
            "alone.",
            unit=TOKENS,
            range=NON_NEGATIVE_COUNT,
            unset="0; sequence 65,536",
            since="0.3",
        ),
    ] = None
    steps: Annotated[int, About("Training steps.", unit=COUNT, since="0.3")] = 400
    batch_size: Annotated[int, About("Sequences per step.", unit=COUNT, since="0.3")] = 8
    tokens: Annotated[
        int,
        About("Tokens per sequence.", unit=TOKENS, range=Range(16, MAX_COUNT), since="0.3"),
    ] = 256
    learning_rate: Annotated[
        float,
        About("Peak learning rate.", unit=NUMBER, range=Range(0, 1, exclusive=True), since="0.3"),
    ] = 3e-4
    compare_speed: Annotated[
        bool,
        About(
            "Measure the decode speed of teacher, INT4 teacher and student at the end.",
            since="0.3",
        ),
    ] = True
    seed: Annotated[
        int,
        shared.SEED_OF_ALL.but(help="Seed of the sequences and of generated text.", since="0.3"),
    ] = 0
