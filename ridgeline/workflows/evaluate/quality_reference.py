"""A model to compare others with: its distributions, answers and outputs on the quality texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec
import numpy as np

from ridgeline.config.settings import Settings
from ridgeline.engine.config import ResolvedSettings, resolve
from ridgeline.engine.engine import Engine
from ridgeline.engine.tokenization import Tokenizer, load_tokenizer
from ridgeline.errors import BadInput
from ridgeline.measure.workload import parse_workload
from ridgeline.optimize import quality
from ridgeline.optimize.quality import (
    LengthDrift,
    LogprobsOf,
    QualityVerdict,
    RecallPart,
    RecallReference,
    SequentialPanel,
    TaskPanelPart,
    TaskReference,
    TextPanelPart,
    TextReference,
    divergence,
    length_drift,
)
from ridgeline.optimize.quality.served_text import ServedReference, ServedTextPart
from ridgeline.optimize.quality.text_comparison import compare_window
from ridgeline.records import Sampling
from ridgeline.workflows.evaluate.evaluation import TextSlice, text_slice
from ridgeline.workflows.evaluate.heldout_text import (
    WINDOW_KINDS,
    heldout_windows,
    quality_tasks,
)
from ridgeline.workflows.evaluate.long_contexts import (
    EngineContexts,
    context_tokens,
    recall_texts,
    texts_to_continue,
)
from ridgeline.workflows.load.tokenized_workload import TokenizedWorkload

MAX_NUM_SEQS, MAX_MODEL_LEN = 16, 2048  # of the engines, unless the settings say otherwise
LONG_CONTEXT = 640  # tokens of the longest context in which facts are asked for
CONTEXT_ENDS = (16, 64, 128, 256, 512, 1024)  # upper ends of the ranges of context lengths
MAX_WINDOW_LOGPROBS = 1 << 25  # tokens × vocabulary of one window held in memory
Outputs = list[tuple[int, ...]]


class EvaluationSize(msgspec.Struct, frozen=True, kw_only=True):
    """How much is read: time per model, greedy outputs, and windows of long context."""

    budget_s: float = 120.0
    num_prompts: int = 32
    answer_tokens: int = 96
    num_long: int = 8


class OpenModel:
    """A configuration whose engine is open until the stack closes."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self.settings = settings
        self.engine = stack.enter_context(Engine.from_settings(_with_small_cache(settings)))
        self.logprobs_of: LogprobsOf = self.engine.logprobs_of

    def generate(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Outputs:
        """Greedy outputs, up to the end of text."""
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        return [tuple(answer.tokens) for answer in self.engine.generate(prompts, sampling)]


def _with_small_cache(settings: Settings) -> Settings:
    """With a KV cache for a few sequences: two or three engines are open at once."""
    model_limit = resolve(settings).max_model_len
    return msgspec.structs.replace(
        settings,
        max_num_seqs=settings.max_num_seqs or MAX_NUM_SEQS,
        max_model_len=settings.max_model_len or min(model_limit, MAX_MODEL_LEN),
    )


class QualityReference:
    """The original, with its distributions on the texts and questions, and its outputs."""

    def __init__(self, original: OpenModel, size: EvaluationSize) -> None:
        self.limits, self._panel_size = quality.load_quality_limits()
        self.original, self._size = original, size
        self._tokenizer, logprobs_of = load_tokenizer(original.settings.model), original.logprobs_of
        self._vocab_size = original.engine.resolved.spec.vocab_size
        windows = heldout_windows(self._tokenizer, self._panel_size.window_tokens)
        self._text = TextReference(windows, logprobs_of, self._panel_size.max_reference_bytes)
        self._tasks = [TaskReference(task, logprobs_of) for task in quality_tasks(self._tokenizer)]
        self._prompts = _prompts(self._tokenizer, original.engine.resolved, size)
        self._outputs = self.outputs_of(original)

    def outputs_of(self, model: OpenModel) -> Outputs:
        """The model's greedy outputs for the prompts."""
        return model.generate(self._prompts, self._size.answer_tokens)

    def compare(self, logprobs_of: LogprobsOf, outputs: Outputs | None = None) -> QualityVerdict:
        """The verdict on another model; with its outputs, where they diverge."""
        return self.compare_by_kind(logprobs_of, outputs)[0]

    def compare_by_kind(
        self, logprobs_of: LogprobsOf, outputs: Outputs | None = None
    ) -> tuple[QualityVerdict, dict[str, TextSlice]]:
        """The verdict, and the comparison on each kind of text."""
        text = TextPanelPart(self._text, logprobs_of, self.limits, self._panel_size)
        tasks = [
            TaskPanelPart(task, logprobs_of, self.limits, self._panel_size) for task in self._tasks
        ]
        panel = SequentialPanel(
            text, tasks, max_looks=self._panel_size.max_looks, clock=time.perf_counter
        )
        panel.run(self._size.budget_s)
        diverged = None if outputs is None else divergence(self._outputs, outputs)
        by_kind = {
            kind: text_slice(
                [window for i, window in enumerate(text.windows) if _kind_of(i) == kind]
            )
            for kind in sorted(set(WINDOW_KINDS))
        }
        return panel.conclude(diverged), {
            kind: part for kind, part in by_kind.items() if part.num_positions
        }

    def compare_long(self, model: OpenModel) -> QualityVerdict | None:
        """The verdict on what a model's KV cache loses in long contexts; None if both have the
        same cache.

        Facts are asked for. Where keys are evicted, long texts are continued as well.
        """
        before, after = self.original.engine.resolved, model.engine.resolved
        evicts = before.kv_eviction_config != after.kv_eviction_config
        if not evicts and before.kv_cache_dtype == after.kv_cache_dtype:
            return None
        longest = context_tokens(LONG_CONTEXT, min(before.max_model_len, after.max_model_len))
        source, candidate = EngineContexts(self.original.engine), EngineContexts(model.engine)
        recall = RecallReference(recall_texts(self._tokenizer, longest), source)
        text = None
        if evicts:
            texts = texts_to_continue(self._tokenizer, longest)
            known = ServedReference(texts, (), source)
            text = ServedTextPart(known, candidate, self.limits, self._panel_size)
        part = RecallPart(recall, candidate, self.limits, self._panel_size, required=evicts)
        panel = SequentialPanel(
            text, [part], max_looks=self._panel_size.max_looks, clock=time.perf_counter
        )
        panel.run(self._size.budget_s)
        return panel.conclude()

    def compare_by_context(self, logprobs_of: LogprobsOf) -> dict[str, TextSlice]:
        """The comparison by the number of tokens before a position, from long windows."""
        resolved = self.original.engine.resolved
        longest = min(resolved.max_model_len, MAX_WINDOW_LOGPROBS // self._vocab_size)
        ends = [end for end in CONTEXT_ENDS if end <= longest]
        windows = heldout_windows(self._tokenizer, ends[-1] + 1)
        original = self.original.logprobs_of
        pairs = [
            (tokens, np.asarray(original(tokens)), logprobs_of(tokens))
            for tokens in windows[: self._size.num_long]
        ]
        starts = [0, *ends[:-1]]
        return {
            f"{start + 1}-{end}": text_slice(
                [
                    compare_window(tokens[start : end + 1], old[start:end], new[start:end])[0]
                    for tokens, old, new in pairs
                ]
            )
            for start, end in zip(starts, ends, strict=True)
        }

    def length_drift(self, outputs: Outputs) -> LengthDrift | None:
        """How the lengths of the outputs changed; None without prompts."""
        if not outputs:
            return None
        return length_drift(self._outputs, outputs, self._size.answer_tokens)


def _kind_of(window: int) -> str:
    return WINDOW_KINDS[window % len(WINDOW_KINDS)]


def _prompts(
    tokenizer: Tokenizer, resolved: ResolvedSettings, size: EvaluationSize
) -> list[tuple[int, ...]]:
    """Questions and starts of code that fit the context; none for a model without a tokenizer."""
    workload = TokenizedWorkload(parse_workload("chat-and-code"), tokenizer)
    try:
        prompts = [request.prompt for request in workload.sample(2 * size.num_prompts, 0)]
    except BadInput:
        return []
    longest = resolved.max_model_len - size.answer_tokens
    return [p for p in prompts if isinstance(p, tuple) and len(p) <= longest][: size.num_prompts]
