"""The rows of a case study, as the console and the page show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.report.numbers import rounded

if TYPE_CHECKING:
    from ridgeline.workflows.lab.case_study import CaseStudy, StageResult


COLUMNS = ("stage", "tok/s", "range", "ms/step", "GB/s", "MBU", "compile", "gain", "agree", "KL")
NOTE = (
    "Medians of the rounds, and the lowest and highest tok/s. GB/s: each weight once and the keys "
    "and values once per step, over its time. MBU: their share of what a read of the weights "
    "reaches. agree, KL: the most likely token and the divergence in nats, against the first stage."
)


def stage_row(study: CaseStudy, stage: StageResult) -> tuple[str, ...]:
    """The cells of a stage that ran, under `COLUMNS`."""
    speeds, quality, gain = stage.values("tok_s"), stage.quality, study.gain(stage)
    return (
        stage.name,
        short(stage.median("tok_s") or 0.0),
        f"{short(min(speeds))}-{short(max(speeds))}",
        f"{1e3 * (stage.median('step_s') or 0.0):.2f}",
        f"{1e-9 * (stage.median('bytes_s') or 0.0):.1f}",
        "" if stage.mbu is None else f"{stage.mbu:.2f}",
        compile_text(stage),
        "" if gain is None else f"{gain:.2f}x",
        "" if quality is None else f"{quality.agreement:.3f}",
        "" if quality is None else rounded(quality.kl, 2),
    )


def short(value: float) -> str:
    """Three digits at least, so that ten columns fit a terminal."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def compile_text(stage: StageResult) -> str:
    """Seconds of torch.compile and of CUDA graphs; empty without either."""
    seconds = (stage.compile_s or 0.0) + (stage.capture_s or 0.0)
    return f"{seconds:.1f} s" if seconds else ""


def remarks(study: CaseStudy) -> list[str]:
    """A line per stage that ran: what it is, with its quality class; then those that did not."""
    lines = []
    for stage in study.stages:
        if stage.why_not:
            lines.append(f"{stage.name}: not run: {stage.why_not}")
            continue
        line = f"{stage.name}: {stage.title}; {stage.honesty}"
        line += f"; {stage.uses['layer_backend']} layers, {stage.uses['attention_backend']}"
        line += " attention"
        per_step = stage.median("tokens_per_step")
        if stage.same_tokens is not None and per_step is not None:
            same = "the tokens" if stage.same_tokens else "NOT the tokens"
            line += f"; {same} of the stage without drafts, {per_step:.2f} tokens a step"
        lines.append(line)
    return lines


def conditions(study: CaseStudy) -> str:
    """Model, machine and load in one sentence."""
    sequences = "1 sequence" if study.num_seqs == 1 else f"{study.num_seqs} sequences"
    rounds = "1 round" if study.num_rounds == 1 else f"{study.num_rounds} interleaved rounds"
    line = (
        f"{study.model} on {study.machine} ({study.device}), torch {study.torch}: {sequences}, "
        f"{study.input_len} prompt tokens of {study.text}, {study.output_len} of output, {rounds}"
    )
    if study.interrupted:
        line += "; interrupted, so that rounds or stages are missing"
    if study.load is not None and study.is_busy:
        taken = study.load.others_share + study.load.stolen_share
        line += f"; the machine was busy: others took {taken:.0%} of its CPU time"
    return line
