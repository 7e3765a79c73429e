"""Explain whether speculative decoding would pay for a model on this machine, by measuring it.

Opens the model, measures the time of a step by its rows and of the drafter, lets it draft for two
short workloads cut from the texts that ship with Ridgeline (one repeats itself, one does not), and
combines both.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import msgspec

from ridgeline.config.settings import Settings, Speculative
from ridgeline.engine.engine import Engine
from ridgeline.engine.speculate.depth_control.controller import MARGIN, DepthController
from ridgeline.engine.speculate.depth_control.fixed_depth import FixedDepth
from ridgeline.engine.speculate.depth_control.plan import DraftingCosts
from ridgeline.engine.speculate.depth_control.report import BreakEvenRow, rows, survivals, verdict
from ridgeline.errors import BadInput
from ridgeline.records import Sampling
from ridgeline.records.progress import Observer, silent, stage
from ridgeline.report.result import Result

BATCHES = (1, 8, 32)
NUM_PROMPTS, OUTPUT_TOKENS, DEPTH = 4, 48, 8


class SpeculationCase(msgspec.Struct, frozen=True, kw_only=True):
    """One workload at one batch size.

    `step_ms`: a step without drafts. `share`: of steps that had a draft. `alpha`: probability that
    the draft token at each position is accepted, if those before it were.
    """

    workload: str
    batch: int
    step_ms: float
    share: float
    alpha: list[float]
    rows: list[BreakEvenRow]
    verdict: str


class SpeculationExplanation(Result, frozen=True, kw_only=True):
    """Whether drafts of `method` pay, by workload and batch size."""

    method: str
    cases: tuple[SpeculationCase, ...]


def explain_speculation(settings: Settings, observer: Observer = silent) -> SpeculationExplanation:
    """Measure every workload at every batch size. BadInput if the number of drafts is fixed."""
    speculative = settings.speculative_config or Speculative(method="ngram")
    if speculative.num_speculative_tokens is not None:
        raise BadInput(
            "a fixed depth leaves nothing to explain",
            value=speculative.num_speculative_tokens,
            fix="leave num_speculative_tokens out of --speculative-config",
        )
    settings = msgspec.structs.replace(settings, speculative_config=speculative)
    with stage(observer, f"drafting with {settings.model}"):
        cases = _measure(settings)
    return SpeculationExplanation(method=speculative.method, cases=tuple(cases))


def _measure(settings: Settings) -> list[SpeculationCase]:
    with Engine.from_settings(settings) as engine:
        controller = engine._loop.scheduler.draft_scheduler._proposer
        assert isinstance(controller, DepthController)
        batches = [batch for batch in BATCHES if batch <= engine.resolved.max_num_seqs]
        cases = []
        for name, prompts in _workloads(engine).items():
            share, survival = _draft(engine, controller, prompts)
            cases += [_case(name, batch, controller, share, survival) for batch in batches]
        return cases


def _case(
    name: str, batch: int, controller: DepthController, share: float, survival: Sequence[float]
) -> SpeculationCase:
    costs: DraftingCosts = controller.costs
    table = rows(costs, batch, survival, controller.max_drafts)
    before = (1.0, *survival)
    return SpeculationCase(
        workload=name,
        batch=batch,
        step_ms=costs.step.seconds(batch, batch) * 1e3,
        share=share,
        alpha=[a / b if b else 0.0 for a, b in zip(survival, before, strict=False)],
        rows=table,
        verdict=verdict(table, share, MARGIN),
    )


def _draft(
    engine: Engine, controller: DepthController, prompts: Sequence[list[int]]
) -> tuple[float, list[float]]:
    """Share of steps that had a draft, and how far drafts of `DEPTH` tokens survived."""
    scheduler = engine._loop.scheduler.draft_scheduler
    sampling = Sampling(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    before = msgspec.structs.replace(scheduler.totals)
    drafted, accepted = list(before.drafted_by_position), list(before.accepted_by_position)
    scheduler._proposer = FixedDepth(controller.drafter, min(DEPTH, controller.max_drafts))
    try:
        engine.generate(prompts, sampling)
    finally:
        scheduler._proposer = controller
    after = scheduler.totals
    num_drafts = after.num_drafts - before.num_drafts
    num_accepted = after.num_accepted - before.num_accepted
    num_steps = len(prompts) * (OUTPUT_TOKENS - 1) - num_accepted
    new_drafted = _increase(after.drafted_by_position, drafted)
    new_accepted = _increase(after.accepted_by_position, accepted)
    new_accepted += [0.0] * (len(new_drafted) - len(new_accepted))
    return num_drafts / max(1, num_steps), survivals(new_drafted, new_accepted)


def _increase(after: Sequence[int], before: Sequence[int]) -> list[float]:
    return [float(n - (before[i] if i < len(before) else 0)) for i, n in enumerate(after)]


def _workloads(engine: Engine) -> dict[str, list[list[int]]]:
    """Prompts as token ids that leave room for the output."""
    max_prompt = engine.resolved.max_model_len - OUTPUT_TOKENS
    if max_prompt < 2 * OUTPUT_TOKENS:
        raise BadInput(
            "the context is too short to try drafts in",
            value=engine.resolved.max_model_len,
            limit=f"{3 * OUTPUT_TOKENS} tokens",
        )
    text = (files("ridgeline") / "assets" / "heldout" / "code.txt").read_text(encoding="utf-8")
    stride = len(text) // NUM_PROMPTS
    pieces = [text[i * stride : i * stride + 500] for i in range(NUM_PROMPTS)]
    repeated = [f"{piece}\n\n# The same again:\n{piece[:160]}" for piece in pieces]
    texts = {"repeated source code": repeated, "new source code": pieces}
    encode = engine.tokenizer.encode
    return {
        name: [encode(text)[-max_prompt:] for text in prompts] for name, prompts in texts.items()
    }
