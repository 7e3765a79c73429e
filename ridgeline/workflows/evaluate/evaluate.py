"""`ridgeline eval A B`: what B says differently from A, and whether it is little.

First the floor: A against itself on another number of threads, which is what rounding alone does.
Then B, by the panel, the thresholds and the paired intervals that `optimize` keeps a lossy rung by.
Last a control: A with one block's feed-forward output three times too large, which must fail; where
it does not, nothing could be seen with this text, and no verdict is given.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np
import torch

from ridgeline.cli.render.evaluate import show
from ridgeline.config.settings import Settings
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.config import ResolvedSettings, resolve
from ridgeline.engine.engine import Engine
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.tokenization import Tokenizer, load_tokenizer
from ridgeline.errors import BadInput
from ridgeline.measure.workload import parse_workload
from ridgeline.optimize import quality
from ridgeline.optimize.quality import (
    Array,
    LengthDrift,
    LogprobsOf,
    QualityVerdict,
    SequentialPanel,
    TaskPanelPart,
    TaskReference,
    TextPanelPart,
    TextReference,
    divergence,
    length_drift,
)
from ridgeline.optimize.quality.text_comparison import compare_window
from ridgeline.records import Sampling
from ridgeline.report.json_line import json_line
from ridgeline.workflows.evaluate.heldout_text import (
    WINDOW_KINDS,
    heldout_windows,
    quality_tasks,
)
from ridgeline.workflows.evaluate.lm_eval import (
    Harness,
    ask,
    compare,
    find_program,
    tokenizer_folder,
)
from ridgeline.workflows.evaluate.verdict import (
    HarnessScore,
    Panel,
    Part,
    part_of,
    refusal,
    with_harness,
)
from ridgeline.workflows.load.tokenized_workload import TokenizedWorkload

LOUD = 3.0  # times, the control's feed-forward output
SEATS, CONTEXT = 16, 2048  # of the engines that are opened, where nobody asked for other numbers
ENDS = (16, 64, 128, 256, 512, 1024)  # of the contexts' lengths
MOST_LOGPROBS = 1 << 25  # of one window


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """How much is read: for so long per model, so many answers, so many windows of long context."""

    budget_s: float = 120.0
    num_prompts: int = 32
    answer_tokens: int = 96
    num_long: int = 8


WHOLE = Extent()
Answers = list[tuple[int, ...]]
Prompts = Sequence[tuple[int, ...]]


def command(
    a: Settings,
    b: Settings,
    as_json: bool,
    extent: Extent = WHOLE,
    harness: Harness | None = None,
) -> int:
    """Print the panel; 0 where B passes, 1 where it fails or nothing can be said."""
    panel = evaluate(a, b, extent, lambda text: print(f"{text} …", file=sys.stderr), harness)
    print(json_line(panel) if as_json else show(panel))
    return 0 if panel.verdict == "pass" else 1


def evaluate(
    a: Settings,
    b: Settings,
    extent: Extent = WHOLE,
    tell: Callable[[str], None] = lambda text: None,
    harness: Harness | None = None,
) -> Panel:
    """Compare two configurations. Raises BadInput where their vocabularies differ, CannotRun where
    lm-eval was asked for and is not there."""
    first, second = resolve(a), resolve(b)
    if harness is not None:
        find_program(harness)  # before minutes of reading
        tokenizer_folder([a.model, b.model])
    if first.spec.vocab_size != second.spec.vocab_size:
        raise BadInput(
            "the models have different vocabularies: their distributions cannot be compared",
            value=f"{first.spec.vocab_size} and {second.spec.vocab_size}",
        )
    with ExitStack() as stack:
        tell(f"reading held-out text with {a.model}")
        bench = _Bench(_Model(a, stack), extent)
        tell("the floor: the same on another number of threads")
        with ExitStack() as short:
            floor = bench.judge(_Model(_on_other_threads(a, first), short))
        tell(f"reading with {b.model}")
        candidate = _Model(b, stack)
        panel = bench.panel(candidate, floor, _control(first), tell)
        if harness is None:
            return panel
        return with_harness(panel, bench.harness(harness, candidate, tell))


class _Model:
    """One configuration that answers and tells distributions."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self.settings = settings
        self.engine = stack.enter_context(Engine.from_settings(_small(settings)))
        self.logprobs_of: LogprobsOf = self.engine.logprobs_of

    def answers(self, prompts: Prompts, max_tokens: int) -> Answers:
        """Greedy answers that may end by themselves."""
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        return [tuple(done.tokens) for done in self.engine.generate(prompts, sampling)]


def _small(settings: Settings) -> Settings:
    """A cache for a few answers: two or three engines are up at once."""
    most = resolve(settings).max_model_len
    return msgspec.structs.replace(
        settings,
        max_num_seqs=settings.max_num_seqs or SEATS,
        max_model_len=settings.max_model_len or min(most, CONTEXT),
    )


def _on_other_threads(settings: Settings, resolved: ResolvedSettings) -> Settings:
    return msgspec.structs.replace(settings, num_threads=1 if resolved.num_threads > 1 else 2)


class _Bench:
    """The original with its texts, questions and answers, and what is compared with it."""

    def __init__(self, original: _Model, extent: Extent) -> None:
        self._gate, self._size = quality.load_quality_limits()
        self._original, self._extent = original, extent
        self._tokenizer, read = load_tokenizer(original.settings.model), original.logprobs_of
        self._vocab_size = original.engine.resolved.spec.vocab_size
        pieces = heldout_windows(self._tokenizer, self._vocab_size, self._size.window_tokens)
        self._text = TextReference(pieces, read, self._size.max_reference_bytes)
        self._tasks = [TaskReference(task, read) for task in quality_tasks(self._tokenizer)]
        self._prompts = _prompts(self._tokenizer, original.engine.resolved, extent)
        self._answers = self._answers_of(original)

    def _answers_of(self, model: _Model) -> Answers:
        return model.answers(self._prompts, self._extent.answer_tokens)

    def judge(self, other: _Model) -> QualityVerdict:
        """The panel for one other model."""
        examination, _ = self._examined(other.logprobs_of)
        return examination.conclude(divergence(self._answers, self._answers_of(other)))

    def panel(
        self, other: _Model, floor: QualityVerdict, control: LogprobsOf, tell: Callable[[str], None]
    ) -> Panel:
        """Everything about the candidate, and the verdict that floor and control allow."""
        examination, text = self._examined(other.logprobs_of)
        answers = self._answers_of(other)
        candidate = examination.conclude(divergence(self._answers, answers))
        by_kind = {
            kind: part_of([text.windows[i] for i in _places(kind, len(text.windows))])
            for kind in sorted(set(WINDOW_KINDS))
        }
        tell("by length of context")
        by_context = self._by_context(other.logprobs_of)
        tell("the control, which must fail")
        spoiled = self._examined(control)[0].conclude()
        refused = refusal(floor, spoiled)
        return Panel(
            original=self._original.settings.model,
            candidate_name=other.settings.model,
            floor=floor,
            candidate=candidate,
            by_kind={kind: part for kind, part in by_kind.items() if part.num_positions},
            by_context=by_context,
            lengths=self._drift(answers),
            control=spoiled,
            refusal=refused,
            verdict="inconclusive" if refused else candidate.verdict,
        )

    def harness(
        self, asked: Harness, other: _Model, tell: Callable[[str], None]
    ) -> tuple[HarnessScore, ...]:
        """lm-eval's tasks, asked of both."""
        models = (self._original, other)
        tokenizer = tokenizer_folder([model.settings.model for model in models])
        found = []
        for model in models:
            tell(f"lm-eval asks {model.settings.model} about {asked.tasks}")
            found.append(ask(asked, model.engine, tokenizer))
        before, after = found
        return compare(before, after, self._gate.task_drop_max)

    def _drift(self, answers: Answers) -> LengthDrift | None:
        if not answers:
            return None
        return length_drift(self._answers, answers, self._extent.answer_tokens)

    def _examined(self, after: LogprobsOf) -> tuple[SequentialPanel, TextPanelPart]:
        gate, size = self._gate, self._size
        text = TextPanelPart(self._text, after, gate, size)
        tasks = [TaskPanelPart(task, after, gate, size) for task in self._tasks]
        examination = SequentialPanel(
            text, tasks, max_looks=size.max_looks, clock=time.perf_counter
        )
        examination.run(self._extent.budget_s)
        return examination, text

    def _by_context(self, after: LogprobsOf) -> dict[str, Part]:
        """Positions by how many tokens they had before them, from windows that long."""
        resolved = self._original.engine.resolved
        longest = min(resolved.max_model_len, MOST_LOGPROBS // self._vocab_size)
        ends = [end for end in ENDS if end <= longest]
        pieces = heldout_windows(self._tokenizer, self._vocab_size, ends[-1] + 1)[
            : self._extent.num_long
        ]
        read = self._original.logprobs_of
        pairs = [(tokens, np.asarray(read(tokens)), after(tokens)) for tokens in pieces]
        starts = [0, *ends[:-1]]
        return {
            f"{start + 1}-{end}": part_of(
                [
                    compare_window(tokens[start : end + 1], old[start:end], new[start:end])[0]
                    for tokens, old, new in pairs
                ]
            )
            for start, end in zip(starts, ends, strict=True)
        }


def _places(kind: str, count: int) -> list[int]:
    return [i for i in range(count) if WINDOW_KINDS[i % len(WINDOW_KINDS)] == kind]


def _prompts(tokenizer: Tokenizer, resolved: ResolvedSettings, extent: Extent) -> Prompts:
    """Questions and beginnings of code that fit; none for a model without a tokenizer."""
    drawn = TokenizedWorkload(parse_workload("chat-and-code"), tokenizer)
    try:
        prompts = [request.prompt for request in drawn.sample(2 * extent.num_prompts, 0)]
    except BadInput:
        return []
    longest = resolved.max_model_len - extent.answer_tokens
    return [p for p in prompts if isinstance(p, tuple) and len(p) <= longest][: extent.num_prompts]


def _control(resolved: ResolvedSettings) -> LogprobsOf:
    """Log-probabilities [T, V] of the original with its fault."""
    decoder = load_decoder(
        resolved.model,
        resolved.spec,
        device=resolved.device,
        compute_dtype=getattr(torch, resolved.dtype),
        seed=resolved.seed,
        layer_backend="torch",
    )
    block = decoder.blocks[len(decoder.blocks) // 2]
    inner = block.mlp
    block.mlp = lambda x_TC: inner(x_TC) * LOUD  # type: ignore[assignment,unused-ignore]
    runner = TorchRunner(decoder, None, None)

    def read(tokens: Sequence[int]) -> Array:
        found: Array = torch.log_softmax(runner.logits(tokens), -1).cpu().numpy()
        return found

    return read
