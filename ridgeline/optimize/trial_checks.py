"""Checks of a candidate's outputs: equal tokens for exact rungs, the quality panel for lossy ones.

A rung that claims to be exact is verified: its greedy continuations of a few prompts, sent together
so that they share batches, must equal the incumbent's. Where two outputs differ at a position whose
two best tokens are practically equal, the difference is rounding and counts as a near tie.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.errors import CannotRun
from ridgeline.optimize import quality
from ridgeline.optimize.comparison.load_runner import LoadRunner
from ridgeline.optimize.environment import (
    ContextSource,
    Deployment,
    Environment,
    LongContexts,
    ServedTexts,
)
from ridgeline.optimize.ladder import Rung
from ridgeline.optimize.quality import (
    Divergence,
    PanelSize,
    QualityLimits,
    RecallPart,
    RecallReference,
    SequentialPanel,
    TaskPanelPart,
    TaskReference,
    TextPanelPart,
    TextReference,
    divergence,
)
from ridgeline.optimize.quality.greedy_divergence import first_difference
from ridgeline.optimize.quality.sequential import TaskPart, TextPart, with_check
from ridgeline.optimize.quality.served_text import (
    ServedQuestionsPart,
    ServedReference,
    ServedTextPart,
)
from ridgeline.optimize.quality.user_evaluation import REPEATS, UserGate
from ridgeline.optimize.result import Exactness
from ridgeline.optimize.result_builder import TrialEvidence
from ridgeline.report.numbers import rounded

CHECK_S = 1.5  # target duration of the continuations
MIN_TOKENS, MAX_TOKENS = 8, 32
GATE_SHARE = 0.08  # largest share of the budget for one candidate's panel
RECALL_SHARE = 0.16  # the same where it asks for facts: a pass takes 64 long contexts

Outputs = list[tuple[int, ...]]


class CandidateChecks:
    """Runs the checks and caches their references: the incumbent's tokens, the baseline's
    distributions.
    """

    def __init__(self, environment: Environment, runner: LoadRunner) -> None:
        self._environment, self._runner = environment, runner
        self._num_tokens = MIN_TOKENS
        self._known: tuple[Deployment, Outputs] | None = None
        self._other_batches: tuple[Deployment, Sequence[Outputs]] | None = None
        self._text: TextReference | None = None
        self._tasks: Sequence[TaskReference] = ()
        self._served: ServedReference | None = None
        self._continued: ServedReference | None = None
        self._recall: RecallReference | None = None
        self._references_frozen = False
        evaluation = environment.evaluation
        margin = 0.0 if evaluation is None else evaluation.margin
        self._user = UserGate(margin, lambda: runner.budget.spent_s)

    @property
    def user_scores(self) -> tuple[float, ...]:
        """The baseline's scores in the user's own evaluation."""
        return self._user.scores

    def restore_user_scores(self, scores: Sequence[float]) -> None:
        """Take over the scores of an interrupted search."""
        self._user.restore(scores)

    async def try_user_evaluation(self, baseline: Deployment) -> None:
        """Run the user's evaluation once on the baseline: a mistake in it must not cost a search.

        Raises CannotRun if it fails there.
        """
        evaluation = self._environment.evaluation
        if evaluation is not None:
            self._runner.stage("Baseline", "running --eval-cmd on it")
            await self._user.score_baseline(lambda: evaluation.run(baseline), 1)

    async def time_one_answer(self, deployment: Deployment) -> float:
        """Seconds of one typical response to a single request, after a short warm-up."""
        prompts = self._environment.check_prompts[:1]
        opened_s = self._runner.budget.spent_s
        await deployment.greedy(prompts, 2)
        self._runner.budget.note_warm_up(self._runner.budget.spent_s - opened_s)
        num_tokens = max(2, min(self._environment.longest_output, MAX_TOKENS))
        begun_s = self._runner.budget.spent_s
        await deployment.greedy(prompts, num_tokens)
        took_s = self._runner.budget.spent_s - begun_s
        per_token_s = max(took_s / num_tokens, 1e-6)
        self._num_tokens = round(min(max(CHECK_S / per_token_s, MIN_TOKENS), MAX_TOKENS))
        return per_token_s * self._environment.longest_output

    async def same_tokens(self, incumbent: Deployment, candidate: Deployment) -> Exactness:
        """Compare greedy continuations of the check prompts."""
        self._runner.report("checking that it generates the same tokens")
        prompts = self._environment.check_prompts
        before = await self._greedy(incumbent)
        after = await candidate.greedy(prompts, self._num_tokens)
        ties, far = 0, []
        for i, (prompt, old, new) in enumerate(zip(prompts, before, after, strict=True)):
            if old == new:
                continue
            where = first_difference(old, new)
            gap = incumbent.margin(prompt, old, where)
            if gap < self._environment.near_tie:
                ties += 1
            else:
                far.append((i, where, gap))
        own = await self._answers_in_other_batches(incumbent) if far else ()
        variation = incumbent.margin_variation() if far else 0.0
        unstable, detail = 0, ""
        for i, where, gap in far:
            same_as_own = any(other[i][: where + 1] == after[i][: where + 1] for other in own)
            if same_as_own or gap <= variation:
                unstable += 1
            elif not detail:
                detail = (
                    f"token {where + 1} of a continuation differs where the two best tokens are "
                    f"{rounded(gap, 2)} nats apart"
                )
                if variation > 0:
                    detail += f"; the baseline's own vary by up to {rounded(variation, 2)} nats"
        return Exactness(
            num_prompts=len(prompts),
            num_tokens=sum(map(len, before)),
            same=not detail,
            near_ties=ties,
            num_unstable=unstable,
            variation=variation,
            detail=detail,
        )

    async def _answers_in_other_batches(self, incumbent: Deployment) -> Sequence[Outputs]:
        """The incumbent's continuations again: each alone, all in the reverse order, all as before.

        Where rounding depends on the batch, a server does not reproduce its own tokens. A change
        that leads to tokens which the unchanged server generates as well is no less exact, and
        neither is one whose tokens are closer than the unchanged server's margins vary.
        """
        if self._other_batches is None or self._other_batches[0] is not incumbent:
            self._runner.report("checking whether the incumbent reproduces its own answers")
            prompts, num_tokens = self._environment.check_prompts, self._num_tokens
            alone = [(await incumbent.greedy([prompt], num_tokens))[0] for prompt in prompts]
            backwards = await incumbent.greedy(prompts[::-1], num_tokens)
            again = await incumbent.greedy(prompts, num_tokens)
            self._other_batches = incumbent, (alone, backwards[::-1], again)
        return self._other_batches[1]

    async def outputs_agree(
        self, rung: Rung, incumbent: Deployment, candidate: Deployment, evidence: TrialEvidence
    ) -> bool:
        """The cheap check before speed is measured: equal tokens, or a first look that does not
        fail.
        """
        if rung.honesty == "exact":
            evidence.exactness = await self.same_tokens(incumbent, candidate)
            return evidence.exactness.same
        evidence.panel = panel = self.examine(rung, incumbent, candidate)
        if panel is None:
            return True
        self._runner.report("taking a first look at its quality")
        panel.look()
        evidence.quality = panel.conclude()
        return evidence.quality.verdict != "fail"

    async def finish_quality(
        self, incumbent: Deployment, candidate: Deployment, evidence: TrialEvidence
    ) -> None:
        """For a lossy candidate that is faster: continue the panel until it is decided, then run
        the user's evaluation.
        """
        comparison, panel = evidence.comparison, evidence.panel
        if comparison is None or comparison.outcome != "improved":
            return
        if evidence.forecast.candidate.rung.honesty == "exact":
            return
        if panel is not None:
            self._runner.report("reading held-out text until its quality is decided")
            self.read_on(panel, evidence.forecast.candidate.rung)
            evidence.quality = panel.conclude(await self.find_divergence(incumbent, candidate))
        evaluation = self._environment.evaluation
        if evaluation is None or (evidence.quality and evidence.quality.verdict == "fail"):
            return
        budget = self._runner.budget
        self._runner.report("running --eval-cmd on the candidate and on the baseline")
        if not self._references_frozen:
            await self._user.score_baseline(lambda: evaluation.run(incumbent), REPEATS)
        check = await self._user.check(
            lambda: evaluation.run(candidate), budget.left_s - budget.closing_cost_s
        )
        evidence.quality = with_check(evidence.quality, check)

    def examine(
        self, rung: Rung, incumbent: Deployment, candidate: Deployment
    ) -> SequentialPanel | None:
        """A panel for a lossy candidate, by what its rung's `gate` names, against the baseline's
        distributions; None if the server gives none, so that only the user's evaluation judges.

        Raises CannotRun if the rung changes what only long contexts show, and they cannot be asked.

        Until a lossy rung is kept, every kept rung was exact, so the incumbent's distributions are
        the baseline's. After that (`freeze_references`) only what was already read can be compared.
        """
        limits, size = quality.load_quality_limits()
        contexts = self._environment.long_contexts
        parts: list[TaskPart] = []
        if "recall" in rung.gate and contexts is not None:
            parts.append(self._recall_part(rung, contexts, incumbent, candidate))
        if "text" not in rung.gate:
            if contexts is None:
                raise CannotRun("what it loses shows in long contexts, which cannot be asked here")
            long_text = self._continuations(contexts, incumbent, candidate, limits, size)
            return self._panel(long_text, parts, size)
        served = self._environment.served
        source = None if served is None else served.source_of(candidate)
        text: TextPart
        tasks: Sequence[TaskPart]
        if served is not None and source is not None:
            try:
                reference = self._served_reference(incumbent, served)
                text = ServedTextPart(reference, source, limits, size)
                tasks = [ServedQuestionsPart(reference, source, limits, size)]
            except CannotRun:
                if self._environment.evaluation is None:
                    raise
                return None
        elif self._environment.heldout:
            windows, known = self._references(incumbent, size)
            text = TextPanelPart(windows, candidate.logprobs_of, limits, size)
            tasks = [TaskPanelPart(task, candidate.logprobs_of, limits, size) for task in known]
        else:
            return None
        return self._panel(text, [*tasks, *parts], size)

    def _panel(self, text: TextPart, tasks: Sequence[TaskPart], size: PanelSize) -> SequentialPanel:
        return SequentialPanel(
            text,
            tasks,
            max_looks=size.max_looks,
            clock=lambda: self._runner.budget.spent_s,
        )

    def _recall_part(
        self, rung: Rung, contexts: LongContexts, incumbent: Deployment, candidate: Deployment
    ) -> RecallPart:
        """Facts in long contexts; decisive where the rung is not judged by short texts as well.

        The original is the incumbent of the first rung that asks: what was kept before changed no
        cache.
        """
        limits, size = quality.load_quality_limits()
        source = contexts.source_of(incumbent)
        if self._recall is None:
            self._recall = RecallReference(contexts.recall, source)
        self._recall.read_with(source)
        required = "text" not in rung.gate
        after = contexts.source_of(candidate)
        return RecallPart(self._recall, after, limits, size, required=required)

    def _continuations(
        self,
        contexts: LongContexts,
        incumbent: Deployment,
        candidate: Deployment,
        limits: QualityLimits,
        size: PanelSize,
    ) -> ServedTextPart:
        """Greedy continuations of long texts, each computed through the cache."""
        source: ContextSource = contexts.source_of(incumbent)
        if self._continued is None:
            self._continued = ServedReference(contexts.texts, (), source)
        self._continued.read_with(source)
        return ServedTextPart(self._continued, contexts.source_of(candidate), limits, size)

    def _served_reference(self, incumbent: Deployment, served: ServedTexts) -> ServedReference:
        """What the original says of the texts. Raises CannotRun if it says nothing."""
        if self._served is None or not self._references_frozen:
            source = served.source_of(incumbent)
            if source is None:
                raise CannotRun("the incumbent scores token ids, and the candidate does not")
            if self._served is None:
                self._served = ServedReference(served.texts, served.questions, source)
            self._served.read_with(source)
            self._served.texts(1)
        return self._served

    def read_on(self, panel: SequentialPanel, rung: Rung) -> None:
        """Continue the panel until it is decided, within its share of the budget."""
        budget = self._runner.budget
        spare_s = budget.left_s - budget.closing_cost_s
        share = RECALL_SHARE if "recall" in rung.gate else GATE_SHARE
        panel.run(min(share * budget.total_s, spare_s))

    async def find_divergence(self, incumbent: Deployment, candidate: Deployment) -> Divergence:
        """Where the greedy outputs for the check prompts diverge."""
        before = await self._greedy(incumbent)
        return divergence(
            before, await candidate.greedy(self._environment.check_prompts, self._num_tokens)
        )

    def freeze_references(self) -> None:
        """Call when a lossy rung is kept: the incumbent no longer speaks for the baseline."""
        if self._text is not None:
            self._text.freeze()
        for task in self._tasks:
            task.freeze()
        for reference in (self._served, self._continued, self._recall):
            if reference is not None:
                reference.freeze()
        self._references_frozen = True

    def _references(
        self, incumbent: Deployment, size: PanelSize
    ) -> tuple[TextReference, Sequence[TaskReference]]:
        read = incumbent.logprobs_of
        if self._text is None:
            assert not self._references_frozen, "references exist before a lossy rung is kept"
            self._text = TextReference(self._environment.heldout, read, size.max_reference_bytes)
            self._tasks = [TaskReference(task, read) for task in self._environment.tasks]
        if not self._references_frozen:
            self._text.read_with(read)
            for task in self._tasks:
                task.read_with(read)
        return self._text, self._tasks

    async def _greedy(self, incumbent: Deployment) -> Outputs:
        if self._known is None or self._known[0] is not incumbent:
            answers = await incumbent.greedy(self._environment.check_prompts, self._num_tokens)
            self._known = incumbent, answers
        return self._known[1]
