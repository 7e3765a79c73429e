"""The torch runner: turns a StepPlan into tensors and the tensors into tokens.

    plan ─▶ copies ─▶ StepBatch (one transfer) ─▶ decoder ─▶ rows ─▶ sampler ─▶ StepResult

It keeps nothing between steps but the weights and the KV cache: whatever it needs is in the plan.

Shape legend: T tokens of the step, S rows that are sampled (with drafts: one for the last known
token and one for each draft), P prompt positions whose log-probabilities were requested,
C hidden_size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import cast

import msgspec
import torch
from torch import Tensor

from ridgeline.engine.adapters.registry import NoAdapters, RunAdapters
from ridgeline.engine.attention.base import Attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.full import piecewise_attention, self_attention
from ridgeline.engine.eviction.evictor import KvEvictor
from ridgeline.engine.execution.base import HiddenStatesObserver, NoObserver
from ridgeline.engine.execution.batch import make_batch
from ridgeline.engine.execution.graphs.ahead import StepsAhead
from ridgeline.engine.execution.graphs.decode import DecodeGraphs, why_no_graphs
from ridgeline.engine.execution.graphs.pieces import PiecewiseGraphs
from ridgeline.engine.execution.greedy_fast_path import (
    ReusedBuffer,
    StateBuffer,
    make_greedy_path,
    new_buffer,
)
from ridgeline.engine.execution.threads import StepThreads
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.sampling import token_logprobs
from ridgeline.engine.sampling.argmax_head import make_argmax_head
from ridgeline.engine.sampling.base import Choice
from ridgeline.engine.sampling.verify.verifier import (
    PathOutput,
    Verifier,
    with_raw_logprobs,
    with_raw_logprobs_of_trees,
)
from ridgeline.engine.scheduler.plan import (
    BlockMoveFailed,
    Run,
    RunOutput,
    SamplePoint,
    StepPlan,
    StepResult,
    draft_paths,
    sample_points,
)
from ridgeline.engine.structured_output.base import TokenMasks, needs_mask
from ridgeline.engine.structured_output.none import NoGrammars
from ridgeline.modelspec.cost.kv_cache import has_states
from ridgeline.records import TokenLogprobs

LOGIT_ROWS = 256  # rows that go through the LM head at a time for prompt log-probabilities


class TorchRunner:
    """Runs plans on one device.

    Without `cache` and `attention` it only scores texts (`logits`, `states`). `observer` is shown
    the hidden states of every step.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache | None,
        attention: Attention | None,
        masks: TokenMasks | None = None,
        verifier: Verifier | None = None,
        observer: HiddenStatesObserver | None = None,
        threads: StepThreads | None = None,
    ) -> None:
        # A scoring runner is never given a plan.
        self.cache, self.attention = cast(KvCache, cache), cast(Attention, attention)
        like = torch.empty(0, dtype=decoder.compute_dtype, device=decoder.device)
        self.decoder = decoder
        self._has_states = has_states(decoder.spec)
        self.evictor = KvEvictor(decoder.spec, self.cache)
        self._self_attention = self_attention(decoder.spec, like, cache, attention)
        self._piecewise_attention = piecewise_attention(decoder.spec, like, cache, attention)
        self.masks = masks or NoGrammars("the runner was built without token masks")
        self.verifier, self.observer = verifier or Verifier(), observer or NoObserver()
        self.threads = threads
        self.adapters: RunAdapters = NoAdapters()
        self.argmax_head = make_argmax_head(decoder)
        # An observer may keep the states, so they must not be overwritten by the next step.
        buffer: StateBuffer = (
            ReusedBuffer() if isinstance(self.observer, NoObserver) else new_buffer
        )
        self.greedy = make_greedy_path(decoder.forward, self.attention, self.argmax_head, buffer)
        self.graphs: DecodeGraphs | None = None
        self.pieces: PiecewiseGraphs | None = None
        self.ahead: StepsAhead | None = None

    def use_adapters(self, adapters: RunAdapters) -> None:
        """Add the adapters that requests choose."""
        self.adapters = adapters

    def use_graphs(self, graphs: DecodeGraphs) -> None:
        """Compute decode steps from CUDA graphs."""
        graphs.keep_states = not isinstance(self.observer, NoObserver)
        self.greedy = self.graphs = graphs

    def use_pieces(self, pieces: PiecewiseGraphs) -> None:
        """Compute steps with prompts from CUDA graphs between their attention calls."""
        pieces.keep_states = not isinstance(self.observer, NoObserver)
        self.pieces = pieces

    def use_steps_ahead(self, ahead: StepsAhead) -> None:
        """Launch each greedy decode step before the one before it is read."""
        self.ahead = ahead

    def graph_counters(self) -> dict[str, float]:
        """Captured and replayed CUDA graphs, steps launched ahead; empty without them."""
        counted = (self.graphs, self.pieces, self.ahead)
        parts = [graphs.counts.as_dict() for graphs in counted if graphs is not None]
        return dict(chain.from_iterable(part.items() for part in parts))

    def describe_graphs(self) -> str:
        """Whether decode steps run from CUDA graphs, and why not."""
        reason = why_no_graphs(self.decoder, self.attention)
        said = f"no CUDA graphs: {reason}" if self.graphs is None else self.graphs.describe()
        return said if self.pieces is None else f"{said}; {self.pieces.describe()}"

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan: feed every run's tokens and sample where requested.

        Raises BlockMoveFailed if blocks could not be moved before the runs.
        """
        runs = plan.runs
        moves = plan.copies or plan.compactions
        if self.ahead is not None:
            if runs and not moves and self.ahead.can_run(runs):
                tokens, x_TC = self.ahead.run(runs)
                return self._argmax_result(tokens, runs, x_TC)
            self.ahead.forget()
        if any(run.branches for run in runs):
            return self._run_trees(plan)
        if moves or not runs or not self._is_greedy_step(runs):
            return self._run_general(plan)
        self._set_threads(sum([len(run.tokens) for run in runs]))
        tokens, x_TC = self.greedy(runs)
        return self._argmax_result(tokens, runs, x_TC)

    def _is_greedy_step(self, runs: Sequence[Run]) -> bool:
        """Whether the greedy path computes a step of these runs."""
        return self.greedy.can_run(runs) and not self.evictor.takes_part(runs)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Float32 logits_TV of one sequence from its start.

        Uses the weights and the attention of steps, with a temporary cache. For perplexity and
        divergence. Memory grows with T·V, so keep T to about a thousand.
        """
        return self.decoder.logits(self.states(tokens))

    @torch.inference_mode()
    def states(self, tokens: Sequence[int]) -> Tensor:
        """The last layer's states x_TC of one sequence from its start."""
        tokens_T = torch.tensor(tokens, device=self.decoder.device)
        positions_T = torch.arange(len(tokens), device=self.decoder.device)
        attend = self._self_attention(tokens)
        self.adapters.begin(())
        return self.decoder.hidden(tokens_T, positions_T, len(tokens), attend)

    def state_pieces(self, tokens: Sequence[int], piece_tokens: int) -> Iterator[Tensor]:
        """The states of one sequence in pieces, each computed when it is taken.

        Steps may run between two pieces. Where a text cannot be divided (`piecewise_attention`), it
        has one piece.
        """
        if self._piecewise_attention is None or len(tokens) <= piece_tokens:
            yield self.states(tokens)
            return
        attend = self._piecewise_attention(tokens)
        for start in range(0, len(tokens), piece_tokens):
            end = min(start + piece_tokens, len(tokens))
            with torch.inference_mode():
                tokens_T = torch.tensor(tokens[start:end], device=self.decoder.device)
                positions_T = torch.arange(start, end, device=self.decoder.device)
                self.adapters.begin(())
                piece_TC = self.decoder.hidden(tokens_T, positions_T, end, attend(start, end))
            yield piece_TC

    def _move_blocks(self, plan: StepPlan) -> None:
        """Copies come first: a compaction may write to a block that is copied."""
        try:
            self.cache.copy_blocks(plan.copies)
            self.evictor.compact(plan.compactions)
        except Exception as error:
            raise BlockMoveFailed from error

    def _set_threads(self, num_rows: int) -> None:
        if self.threads is not None:
            self.threads.begin(num_rows)

    @torch.inference_mode()
    def _run_general(self, plan: StepPlan) -> StepResult:
        """The path for any step without draft branches."""
        self._move_blocks(plan)
        if not plan.runs:
            return StepResult(())
        is_observed = self.evictor.takes_part(plan.runs)
        if self.graphs is not None and not is_observed and self.graphs.can_decode(plan.runs):
            return self._run_decode(plan.runs, self.graphs)
        if self.pieces is not None and not is_observed and self.pieces.can_run(plan.runs):
            x_TC, rows_S = self.pieces(plan.runs)
        else:
            x_TC, rows_S = self._hidden(plan.runs)
        if all(run.is_argmax and run.prompt_logprobs is None for run in plan.runs):
            return self._argmax_result(self.argmax_head(x_TC), plan.runs, x_TC)
        choices, unsampled = self._sample(plan.runs, x_TC, rows_S)
        self.observer.observe(plan.runs, [len(own) for own in choices], x_TC)
        prompts = self._prompt_logprobs(plan.runs, x_TC)
        return _result(choices, prompts, unsampled)

    def _hidden(self, runs: Sequence[Run]) -> tuple[Tensor, Callable[[], Tensor]]:
        """The states x_TC of a step without graphs, and what finds the rows_S it samples."""
        batch = make_batch(runs, self.decoder.device)
        self._set_threads(len(batch.tokens_T))
        self.adapters.begin(runs)
        attend = self.evictor.wrap(runs, self.attention.prepare(runs))
        x_TC = self.decoder.hidden(batch.tokens_T, batch.positions_T, batch.end, attend)
        return x_TC, batch.sampled_rows

    def _run_decode(self, runs: Sequence[Run], graphs: DecodeGraphs) -> StepResult:
        """A step whose every row is sampled, from a graph."""
        if graphs.can_run(runs):
            tokens, x_TC = graphs(runs)
            return self._argmax_result(tokens, runs, x_TC)
        raw_SV, x_TC = graphs.logits(runs)
        points = list(chain.from_iterable(map(sample_points, runs)))
        choices, unsampled = self._choose(runs, raw_SV, points)
        self.observer.observe(runs, [len(own) for own in choices], x_TC)
        return _result(choices, [()] * len(runs), unsampled)

    @torch.inference_mode()
    def _run_trees(self, plan: StepPlan) -> StepResult:
        """A step with draft branches: every path of a run's tree is fed as a separate run."""
        paths = [draft_paths(run) for run in plan.runs]
        runs = list(chain.from_iterable(paths))
        self._move_blocks(plan)
        self._set_threads(sum([len(run.tokens) for run in runs]))
        if self._is_greedy_step(runs):
            tokens, x_TC = self.greedy(runs)
            accepted = self.verifier.accept_argmax_trees(tokens, plan.runs)
            return self._tree_result(accepted, paths, x_TC)
        batch = make_batch(runs, self.decoder.device)
        self.adapters.begin(runs)
        attend = self.evictor.wrap(runs, self.attention.prepare(runs))
        x_TC = self.decoder.hidden(batch.tokens_T, batch.positions_T, batch.end, attend)
        points = list(chain.from_iterable(map(sample_points, runs)))
        raw_SV = self.decoder.logits(x_TC[batch.sampled_rows()])
        logits_SV = self.masks.apply(raw_SV, points)
        accepted = self.verifier.accept_trees(logits_SV, plan.runs, points)
        if logits_SV is not raw_SV:
            accepted = with_raw_logprobs_of_trees(accepted, raw_SV, paths, points)
        return self._tree_result(accepted, paths, x_TC)

    def _tree_result(
        self, accepted: Sequence[PathOutput], paths: Sequence[Sequence[Run]], x_TC: Tensor
    ) -> StepResult:
        """The outputs; observers are shown only the rows of the accepted paths."""
        runs = list(chain(*paths))
        firsts = list(accumulate((len(run.tokens) for run in runs), initial=0))
        starts = accumulate((len(own) for own in paths), initial=0)
        chosen = [start + own.path for start, own in zip(starts, accepted, strict=False)]
        prompts = self._prompt_logprobs(runs, x_TC)
        rows = [range(firsts[i], firsts[i + 1]) for i in chosen]
        kept = torch.tensor(list(chain(*rows)), device=x_TC.device)
        self.observer.observe(
            [runs[i] for i in chosen], [len(own.choices) for own in accepted], x_TC[kept]
        )
        return StepResult(
            tuple(
                msgspec.structs.replace(_output(own.choices, prompts[i]), path=own.path)
                for i, own in zip(chosen, accepted, strict=True)
            )
        )

    def _argmax_result(
        self, tokens: Sequence[int], runs: Sequence[Run], x_TC: Tensor
    ) -> StepResult:
        """The outputs if `tokens` holds the largest logit's token of every row."""
        accepted = self.verifier.accept_argmax(tokens, runs)
        self.observer.observe(runs, list(map(len, accepted)), x_TC)
        return StepResult(tuple([RunOutput(own) for own in accepted]))

    def _sample(
        self, runs: Sequence[Run], x_TC: Tensor, sampled_rows: Callable[[], Tensor]
    ) -> tuple[list[list[Choice]], Mapping[int, RunOutput]]:
        """The choices of each run; none for a run that does not sample."""
        points = list(chain.from_iterable(map(sample_points, runs)))
        if not points:
            return [[]] * len(runs), {}
        every_row = len(points) == len(x_TC)
        rows_SC = x_TC if every_row else x_TC.index_select(0, sampled_rows())
        return self._choose(runs, self.decoder.logits(rows_SC), points)

    def _choose(
        self, runs: Sequence[Run], logits_SV: Tensor, points: Sequence[SamplePoint]
    ) -> tuple[list[list[Choice]], Mapping[int, RunOutput]]:
        """The choices of each run, given the logits of its sampled rows, which are masked in place,
        and the outputs of runs that sample nothing in this step, by index.
        """
        if not needs_mask(points):
            return self.verifier.accept(logits_SV, runs, points), {}
        rows = [i for i, run in enumerate(runs) for _ in range(run.max_outputs)]  # index of the run
        can_wait = [self._can_wait(runs[i]) for i in rows]
        raw_SV = logits_SV.clone() if any(map(_has_raw_logprobs, points)) else None
        unmasked = self.masks.apply_in_time(logits_SV, points, can_wait)
        choices = self.verifier.accept(logits_SV, runs, points)
        if raw_SV is not None:
            choices = with_raw_logprobs(choices, raw_SV, runs, points)
        unsampled = {rows[row]: RunOutput(is_late=True) for row in unmasked.late}
        unsampled |= {rows[row]: RunOutput(error=error) for row, error in unmasked.failed.items()}
        return [[] if i in unsampled else own for i, own in enumerate(choices)], unsampled

    def _can_wait(self, run: Run) -> bool:
        """Whether the run's last token may be fed again instead of being sampled after: nothing
        else keeps a state of it."""
        keeps_state = run.num_drafts > 0 or run.eviction is not None or self._has_states
        return not keeps_state and isinstance(self.observer, NoObserver)

    def _prompt_logprobs(
        self, runs: Sequence[Run], x_TC: Tensor
    ) -> list[tuple[TokenLogprobs, ...]]:
        firsts = accumulate((len(run.tokens) for run in runs), initial=0)
        return [
            () if run.prompt_logprobs is None else self._score_run(run, first, x_TC)
            for run, first in zip(runs, firsts, strict=False)
        ]

    def _score_run(self, run: Run, first: int, x_TC: Tensor) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt tokens that follow each of the run's positions."""
        assert run.prompt_logprobs is not None
        last = () if run.next_prompt_token is None else (run.next_prompt_token,)
        targets = (*run.tokens[1:], *last)
        scored: list[TokenLogprobs] = []
        for at in range(0, len(targets), LOGIT_ROWS):
            chunk = targets[at : at + LOGIT_ROWS]
            x_PC = x_TC[first + at : first + at + len(chunk)]
            scored += token_logprobs(self.decoder.logits(x_PC), chunk, run.prompt_logprobs)
        return tuple(scored)


def _has_raw_logprobs(point: SamplePoint) -> bool:
    """Whether log-probabilities of logits before their mask are reported."""
    return point.sampling.is_masked and point.sampling.logprobs is not None


def _result(
    choices: Sequence[list[Choice]],
    prompts: Sequence[tuple[TokenLogprobs, ...]],
    unsampled: Mapping[int, RunOutput],
) -> StepResult:
    outputs = list(map(_output, choices, prompts))
    for i, output in unsampled.items():
        outputs[i] = msgspec.structs.replace(output, prompt_logprobs=prompts[i])
    return StepResult(tuple(outputs))


def _output(choices: list[Choice], prompt: tuple[TokenLogprobs, ...]) -> RunOutput:
    logprobs = tuple(own for _, own in choices if own is not None)
    return RunOutput(tuple(token for token, _ in choices), logprobs, prompt)
