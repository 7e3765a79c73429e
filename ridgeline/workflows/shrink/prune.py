"""Prune a model: remove layers, channels, heads or single weights, and measure what it costs."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from ridgeline.config.compression import PruneOptions
from ridgeline.errors import BadInput
from ridgeline.records.progress import Message, Observer, StageAdvanced, silent
from ridgeline.report.result import Result

if TYPE_CHECKING:
    from ridgeline.compress.progress import QuantizeProgress
    from ridgeline.compress.prune.recipe import PruneRecipe
    from ridgeline.compress.prune.report import PrunedLayerReport

JUDGED_WINDOWS = 16
STAGE = "layers"
NO_SPEED_UP = (
    "zeros are multiplied like other weights: no speed-up, but for 2:4 with --quantization "
    "sparse-24-int8 (CPUs with AVX-512 VBMI2) or sparse-24 (CUDA)"
)


class PruneResult(Result, frozen=True, kw_only=True):
    """A pruned model. Pairs are before and after; `num_bytes` are those of the weights on disk.

    `perplexity` is of held-out text shipped with Ridgeline.
    """

    model: str
    output: str
    dropped_layers: tuple[int, ...]
    num_channels: tuple[int, int]
    num_kv_heads: tuple[int, int]
    num_params: tuple[int, int]
    num_bytes: tuple[int, int]
    perplexity: tuple[float, float]
    layers: tuple[PrunedLayerReport, ...]
    is_smaller: bool
    seconds: float


def prune(
    model: str, output: Path, options: PruneOptions, observer: Observer = silent
) -> PruneResult:
    """Prune `model` into the empty folder `output`.

    An interrupted run resumes with the same arguments. Raises BadInput, BadModel or CannotRun.
    """
    from ridgeline.compress.prune.prune_model import prunable_spec, prune_model
    from ridgeline.engine.tokenization import load_tokenizer
    from ridgeline.workflows.evaluate.heldout_text import heldout_windows

    start_s, recipe = perf_counter(), check_options(output, options)
    prunable_spec(model)  # before its tokenizer is asked for
    judged = heldout_windows(load_tokenizer(model), recipe.window_tokens)[:JUDGED_WINDOWS]

    def report_progress(progress: QuantizeProgress) -> None:
        done = progress.layer + 1
        observer(
            StageAdvanced(
                stage=STAGE,
                completed=done,
                total=progress.num_layers,
                detail=f"{progress.took_s:.1f} s",
                remaining_s=progress.left_s,
            )
        )
        if progress.note:
            observer(Message(text=f"layer {done}: {progress.note}"))

    report = prune_model(
        model,
        recipe,
        output,
        calibration=options.calibration_text,
        judged=judged,
        sparse=options.format == "sparse-24",
        on_progress=report_progress,
    )
    return PruneResult(
        model=model,
        output=str(output),
        dropped_layers=report.dropped_layers,
        num_channels=report.num_channels,
        num_kv_heads=report.num_kv_heads,
        num_params=report.num_params,
        num_bytes=report.num_bytes,
        perplexity=report.perplexity,
        layers=report.layers,
        is_smaller=report.num_params[1] < report.num_params[0],
        seconds=perf_counter() - start_s,
    )


def check_options(output: Path, options: PruneOptions) -> PruneRecipe:
    """The recipe of the options. Raises BadInput for options that no model can have."""
    from ridgeline.compress.calibration import read_text
    from ridgeline.compress.prune.recipe import PruneRecipe, check, parse_sparsity
    from ridgeline.compress.writers.store import refuse_output

    refuse_output(output)
    sparsity, pattern = parse_sparsity(options.sparsity)
    structured = options.drop_channels or options.drop_kv_heads
    unused = {
        "--method": options.method != "wanda" and not sparsity,
        "--importance": options.importance != "wanda" and not structured,
        "--no-compensate": not options.compensate and not structured,
    }
    for flag, given in unused.items():
        if given:
            needs = "--sparsity" if flag == "--method" else "--drop-channels or --drop-kv-heads"
            raise BadInput(f"{flag} has no effect without {needs}", fix=f"leave {flag} out")
    if options.format == "sparse-24" and pattern != "2:4":
        raise BadInput(
            "--format sparse-24 holds 2:4 masks alone", fix="add --sparsity 2:4, or use dense"
        )
    read_text(options.calibration_text)
    return check(
        PruneRecipe(
            drop_layers=options.drop_layers,
            drop_channels=options.drop_channels,
            drop_kv_heads=options.drop_kv_heads,
            importance=options.importance,
            compensate=options.compensate,
            sparsity=sparsity,
            pattern=pattern,
            method=options.method,
            num_windows=options.calibration_windows,
            window_tokens=options.calibration_tokens,
            seed=options.seed,
        )
    )
