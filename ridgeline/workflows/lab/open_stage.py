"""One stage of the case study as an open engine: its backends, its quality, its rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.engine.engine import Engine
from ridgeline.engine.kernels.pointwise import COMPILE_CLOCK
from ridgeline.modelspec.cost import CostModel, cost_model
from ridgeline.optimize.quality import Array
from ridgeline.optimize.quality.text_comparison import compare_window
from ridgeline.records import Sampling, StepStat
from ridgeline.workflows.lab.case_study import StageQuality, StageRound

Prompts = Sequence[tuple[int, ...]]
Outputs = list[tuple[int, ...]]
SHOWN_SETTINGS = ("layer_backend", "attention_backend", "dtype", "kv_cache_dtype", "thread_plan")


class StageWork(msgspec.Struct, frozen=True, kw_only=True):
    """What every stage decodes, and the text that its distributions are compared on.

    Prompts have one length; their first token is not among the `output_len - 1` that are timed.
    """

    prompts: tuple[tuple[int, ...], ...]
    output_len: int
    windows: tuple[tuple[int, ...], ...]

    @property
    def input_len(self) -> int:
        return len(self.prompts[0])


class OpenStage:
    """A stage whose engine is open and warm: it has decoded the prompts once."""

    def __init__(self, settings: Settings, work: StageWork) -> None:
        compiled_s, began_s = _compile_seconds(), time.perf_counter()
        self._work = work
        self.engine = Engine.from_settings(settings)
        self.load_s = time.perf_counter() - began_s
        try:
            self.outputs = self.generate()
        except BaseException:
            self.engine.close()
            raise
        self.compile_s = _compile_seconds() - compiled_s
        self.capture_s = self.engine.counters().get("graph_capture_s", 0.0)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def uses(self) -> dict[str, str]:
        """The backends and data types that it runs with, and its decode graphs."""
        info = self.engine.info
        shown = {name: str(info.settings[name]) for name in SHOWN_SETTINGS if name in info.settings}
        return shown | {"graphs": info.derivations["decode_graphs"]}

    def generate(self) -> Outputs:
        """Greedy outputs of all prompts at once, past the end of text."""
        sampling = Sampling(temperature=0.0, max_tokens=self._work.output_len, ignore_eos=True)
        answers = self.engine.generate(self._work.prompts, sampling)
        return [tuple(answer.tokens) for answer in answers]

    def run_round(self) -> StageRound:
        """Decode the prompts again, and time the steps after the last prompt."""
        self.engine.drain_steps()
        self.outputs = self.generate()
        model = cost_model(self.engine.resolved.spec)
        return round_of(model, self.engine.drain_steps(), self._work)

    def distributions(self) -> list[Array]:
        """[T, V] log-probabilities of every window."""
        return [self.engine.logprobs_of(window) for window in self._work.windows]

    def compare(self, reference: Sequence[Array]) -> StageQuality | None:
        """Against the distributions of the first stage; None without windows."""
        if not reference:
            return None
        pairs = zip(self._work.windows, reference, self.distributions(), strict=True)
        rows = [compare_window(tokens, before, after)[0] for tokens, before, after in pairs]
        count = sum(row.count for row in rows)
        return StageQuality(
            agreement=sum(row.same_top for row in rows) / count,
            kl=sum(row.kl for row in rows) / count,
            num_tokens=count,
        )


def _compile_seconds() -> float:
    return sum(COMPILE_CLOCK.seconds.values())


def round_of(model: CostModel, steps: Sequence[StepStat], work: StageWork) -> StageRound:
    """The figures of the steps that follow the last one with a part of a prompt.

    A sequence of which a step finds n tokens in the cache has n + 1 - input_len tokens of output.
    """
    last = max(i for i, step in enumerate(steps) if _feeds_prompt(step, work.input_len))
    decodes = steps[last + 1 :]
    first = decodes[0]
    before = sum(cached + 1 - work.input_len for _, cached in first.shapes)
    tokens = len(work.prompts) * work.output_len - before
    seconds = decodes[-1].at_s + decodes[-1].plan_s + decodes[-1].run_s - first.at_s
    num_bytes = sum(model.step(step.shapes, step.num_sampled).bytes for step in decodes)
    return StageRound(
        tok_s=tokens / seconds,
        step_s=statistics.median(step.plan_s + step.run_s for step in decodes),
        bytes_s=float(num_bytes) / seconds,
        tokens_per_step=tokens / sum(len(step.shapes) for step in decodes),
    )


def _feeds_prompt(step: StepStat, input_len: int) -> bool:
    return any(cached < input_len for _, cached in step.shapes)
