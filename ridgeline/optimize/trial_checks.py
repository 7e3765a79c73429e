"""Does a candidate still say the same? Token for token if it claims to be exact, by the quality
panel if not.

An exact rung is checked and not believed: its greedy continuations of a few prompts, sent
together so that they share batches, must equal the incumbent's. Where two outputs part at a
position whose two best tokens are as good as equal, that is rounding and is counted as a near
tie.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.optimize import quality
from ridgeline.optimize.comparison.load_runner import LoadRunner
from ridgeline.optimize.environment import Deployment, Environment
from ridgeline.optimize.quality import (
    Divergence,
    PanelSize,
    SequentialPanel,
    TaskPanelPart,
    TaskReference,
    TextPanelPart,
    TextReference,
    divergence,
)
from ridgeline.optimize.quality.greedy_divergence import first_difference
from ridgeline.optimize.result import Exactness
from ridgeline.optimize.result_builder import TrialEvidence

CHECK_S = 1.5  # about how long the continuations may take
LEAST_TOKENS, MOST_TOKENS = 8, 32
GATE_SHARE = 0.08  # of the budget, at most, for the panel of one candidate

Outputs = list[tuple[int, ...]]


class CandidateChecks:
    """Holds what the checks compare with: the incumbent's tokens, the baseline's distributions."""

    def __init__(self, environment: Environment, runner: LoadRunner) -> None:
        self._environment, self._runner = environment, runner
        self._num_tokens = LEAST_TOKENS
        self._known: tuple[Deployment, Outputs] | None = None
        self._text: TextReference | None = None
        self._tasks: Sequence[TaskReference] = ()
        self._gone = False

    async def time_one_answer(self, deployment: Deployment) -> float:
        """Seconds of one typical answer to a lone request, after a little warm-up."""
        prompts = self._environment.check_prompts[:1]
        await deployment.greedy(prompts, 2)
        num_tokens = max(2, min(self._environment.longest_output, MOST_TOKENS))
        begun_s = self._runner.budget.spent_s
        await deployment.greedy(prompts, num_tokens)
        took_s = self._runner.budget.spent_s - begun_s
        per_token_s = max(took_s / num_tokens, 1e-6)
        self._num_tokens = round(min(max(CHECK_S / per_token_s, LEAST_TOKENS), MOST_TOKENS))
        return per_token_s * self._environment.longest_output

    async def same_tokens(self, incumbent: Deployment, candidate: Deployment) -> Exactness:
        """Compare greedy continuations of the check prompts."""
        self._runner.tell("checking that it gives the same tokens")
        prompts = self._environment.check_prompts
        before = await self._greedy(incumbent)
        after = await candidate.greedy(prompts, self._num_tokens)
        ties, detail = 0, ""
        for prompt, old, new in zip(prompts, before, after, strict=True):
            if old == new:
                continue
            where = first_difference(old, new)
            gap = incumbent.margin(prompt, old, where)
            if gap < self._environment.near_tie:
                ties += 1
            else:
                detail = detail or (
                    f"token {where + 1} of a continuation differs where the two best tokens are "
                    f"{gap:.2g} nats apart"
                )
        return Exactness(
            num_prompts=len(prompts),
            num_tokens=sum(map(len, before)),
            same=not detail,
            near_ties=ties,
            detail=detail,
        )

    async def outputs_agree(
        self, honesty: str, incumbent: Deployment, candidate: Deployment, evidence: TrialEvidence
    ) -> bool:
        """Before any time goes into speed: equal tokens, or a first look that does not fail."""
        if honesty == "exact":
            evidence.exactness = await self.same_tokens(incumbent, candidate)
            return evidence.exactness.same
        self._runner.tell("a first look at what it says of held-out text")
        evidence.examination = examination = self.examine(incumbent, candidate)
        examination.look()
        evidence.quality = examination.conclude()
        return evidence.quality.verdict != "fail"

    async def finish_quality(
        self, incumbent: Deployment, candidate: Deployment, evidence: TrialEvidence
    ) -> None:
        """A lossy candidate that is faster: the panel reads on until it is decided."""
        examination, found = evidence.examination, evidence.comparison
        if examination is None or found is None or found.outcome != "improved":
            return
        self._runner.tell("reading held-out text until its quality is decided")
        self.read_on(examination)
        evidence.quality = examination.conclude(await self.parting(incumbent, candidate))

    def examine(self, incumbent: Deployment, candidate: Deployment) -> SequentialPanel:
        """A lossy candidate under the panel, against the baseline's own distributions.

        Until a lossy rung is kept every kept rung was exact, so the incumbent speaks for the
        baseline; from then on (`freeze_references`) what was read of it must do.
        """
        gate, size = quality.load_quality_limits()
        text, tasks = self._references(incumbent, size)
        return SequentialPanel(
            TextPanelPart(text, candidate.logprobs_of, gate, size),
            [TaskPanelPart(task, candidate.logprobs_of, gate, size) for task in tasks],
            most_looks=size.most_looks,
            clock=lambda: self._runner.budget.spent_s,
        )

    def read_on(self, examination: SequentialPanel) -> None:
        """Until it is decided, within the gate's share of the budget."""
        budget = self._runner.budget
        spare_s = budget.left_s - budget.closing_cost_s
        examination.run(min(GATE_SHARE * budget.total_s, spare_s))

    async def parting(self, incumbent: Deployment, candidate: Deployment) -> Divergence:
        """Where greedy answers to the check prompts part."""
        before = await self._greedy(incumbent)
        return divergence(
            before, await candidate.greedy(self._environment.check_prompts, self._num_tokens)
        )

    def freeze_references(self) -> None:
        """A lossy rung was kept: the incumbent no longer says what the baseline said."""
        if self._text is not None:
            self._text.freeze()
        for task in self._tasks:
            task.freeze()
        self._gone = True

    def _references(
        self, incumbent: Deployment, size: PanelSize
    ) -> tuple[TextReference, Sequence[TaskReference]]:
        read = incumbent.logprobs_of
        if self._text is None:
            assert not self._gone, "a lossy rung is kept after it was examined"
            self._text = TextReference(self._environment.heldout, read, size.max_reference_bytes)
            self._tasks = [TaskReference(task, read) for task in self._environment.tasks]
        if not self._gone:
            self._text.read_with(read)
            for task in self._tasks:
                task.read_with(read)
        return self._text, self._tasks

    async def _greedy(self, incumbent: Deployment) -> Outputs:
        if self._known is None or self._known[0] is not incumbent:
            answers = await incumbent.greedy(self._environment.check_prompts, self._num_tokens)
            self._known = incumbent, answers
        return self._known[1]
