"""`ridgeline explain speculation [MODEL]`: would drafts pay for this model here, and why.

Opens the model, measures T(rows) and the drafter, lets it draft for two short workloads cut from
the texts that ship with Ridgeline (much repetition, little repetition), and puts both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import msgspec
from rich.console import Console
from rich.table import Table

from ridgeline.config.settings import Settings, Speculative
from ridgeline.engine.engine import Engine
from ridgeline.engine.speculate.depth_control.controller import MARGIN, DepthController
from ridgeline.engine.speculate.depth_control.fixed_depth import FixedDepth
from ridgeline.engine.speculate.depth_control.plan import DraftingCosts
from ridgeline.engine.speculate.depth_control.report import BreakEvenRow, rows, survivals, verdict
from ridgeline.errors import BadInput
from ridgeline.records import Sampling
from ridgeline.report.json_line import json_line

BATCHES = (1, 8, 32)
PROMPTS, TOKENS, DEPTH = 4, 48, 8


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One workload at one batch."""

    workload: str
    batch: int
    step_ms: float
    share: float
    alpha: list[float]
    rows: list[BreakEvenRow]
    verdict: str


def command(settings: Settings, json: bool = False, console: Console | None = None) -> int:
    """Print it; the exit code. Raises BadInput where a fixed depth is asked for."""
    asked = settings.speculative_config or Speculative(method="ngram")
    if asked.num_speculative_tokens is not None:
        raise BadInput(
            "a fixed depth leaves nothing to explain",
            value=asked.num_speculative_tokens,
            fix="leave num_speculative_tokens out of --speculative-config",
        )
    told = measured(msgspec.structs.replace(settings, speculative_config=asked))
    if json:
        print(json_line(told))
        return 0
    out = console or Console(highlight=False)
    for each in told:
        _show(out, asked.method, each)
    return 0


def measured(settings: Settings) -> list[Told]:
    """Every workload at every batch that has seats."""
    with Engine.open(**msgspec.to_builtins(settings)) as engine:
        controller = engine._loop.scheduler.draft_scheduler._proposer
        assert isinstance(controller, DepthController)
        costs, most = controller.costs, controller.max_drafts
        batches = [b for b in BATCHES if b <= engine.resolved.max_num_seqs]
        found = []
        for name, prompts in _workloads(engine).items():
            share, alive = _drafted(engine, controller, prompts)
            found += [_told(name, b, costs, most, share, alive) for b in batches]
        return found


def _told(
    name: str, batch: int, costs: DraftingCosts, most: int, share: float, alive: Sequence[float]
) -> Told:
    table = rows(costs, batch, alive, most)
    before = (1.0, *alive)
    return Told(
        workload=name,
        batch=batch,
        step_ms=costs.step.seconds(batch, batch) * 1e3,
        share=share,
        alpha=[a / b if b else 0.0 for a, b in zip(alive, before, strict=False)],
        rows=table,
        verdict=verdict(table, share, MARGIN),
    )


def _drafted(
    engine: Engine, controller: DepthController, prompts: Sequence[list[int]]
) -> tuple[float, list[float]]:
    """Share of steps that had a draft, and how far drafts of DEPTH tokens got."""
    drafting = engine._loop.scheduler.draft_scheduler
    sampling = Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    before = msgspec.structs.replace(drafting.totals)
    tried, kept = list(before.drafted_by_position), list(before.accepted_by_position)
    drafting._proposer = FixedDepth(controller.drafter, min(DEPTH, controller.max_drafts))
    try:
        engine.generate(prompts, sampling)
    finally:
        drafting._proposer = controller
    after = drafting.totals
    num_drafts = after.num_drafts - before.num_drafts
    num_steps = len(prompts) * (TOKENS - 1) - (after.num_accepted - before.num_accepted)
    more_tried = _less(after.drafted_by_position, tried)
    more_kept = _less(after.accepted_by_position, kept)
    more_kept += [0.0] * (len(more_tried) - len(more_kept))
    return num_drafts / max(1, num_steps), survivals(more_tried, more_kept)


def _less(now: Sequence[int], then: Sequence[int]) -> list[float]:
    return [float(n - (then[i] if i < len(then) else 0)) for i, n in enumerate(now)]


def _workloads(engine: Engine) -> dict[str, list[list[int]]]:
    """Prompts as tokens, at most half of the context long."""
    most = engine.resolved.max_model_len - TOKENS
    if most < 2 * TOKENS:
        raise BadInput(
            "the context is too short to try drafts in",
            value=engine.resolved.max_model_len,
            limit=f"{3 * TOKENS} tokens",
        )
    text = (files("ridgeline") / "assets" / "heldout" / "code.txt").read_text(encoding="utf-8")
    step = len(text) // PROMPTS
    pieces = [text[i * step : i * step + 500] for i in range(PROMPTS)]
    again = [f"{piece}\n\n# The same again:\n{piece[:160]}" for piece in pieces]
    given = {"source to be repeated": again, "source that goes on": pieces}
    encode = engine.tokenizer.encode
    return {name: [encode(one)[-most:] for one in some] for name, some in given.items()}


def _show(out: Console, method: str, told: Told) -> None:
    places = " ".join(f"{chance:.2f}" for chance in told.alpha[:DEPTH])
    out.print(
        f"[bold]{method}, {told.workload}, batch {told.batch}[/bold]: a plain step takes "
        f"{told.step_ms:.2f} ms; accepted, place by place: {places or 'nothing was drafted'}"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("drafts", "T / T plain", "break-even", "tokens a step", "gain"):
        table.add_column(name, justify="right")
    for row in told.rows:
        even = "none" if row.break_even is None else f"{row.break_even:.2f}"
        numbers = f"{row.slower:.2f}", even, f"{row.tokens:.2f}", f"{row.gain:.2f}"
        table.add_row(str(row.depth), *numbers)
    out.print(table)
    out.print(f"verdict: {told.verdict}\n")
