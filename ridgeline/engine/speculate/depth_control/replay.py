"""What lookups would have gained on known text: the controller's decisions on a virtual clock.

Nothing is computed: the text shows which guesses were right, the given curve how long steps would
have taken. A quick estimate before serving, for example from prompts, as far as responses repeat
themselves as prompts do.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.scheduler.speculation.base import DraftContext, DraftOutcome, StepCapacity
from ridgeline.engine.speculate.depth_control.controller import DepthController
from ridgeline.engine.speculate.depth_control.step_cost import StepTimeCurve
from ridgeline.engine.speculate.drafters.base import Lookup
from ridgeline.records import Sampling

_GREEDY = Sampling(temperature=0.0)
_RUN = Run(0, 0, (1,), (), None)
Text = tuple[Sequence[int], int]
"""Tokens, and how many of them are the prompt."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """Virtual seconds with drafts and without, for the same tokens."""

    num_tokens: int
    num_steps: int
    seconds: float
    plain_s: float

    @property
    def gain(self) -> float:
        return self.plain_s / self.seconds if self.seconds else 1.0


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Sequence:
    """One text in progress."""

    def __init__(self, seq_id: int, text: Text) -> None:
        self.seq_id, (self.whole, self.num_prompt) = seq_id, text
        self.known = list(self.whole[: self.num_prompt])

    @property
    def left(self) -> int:
        return len(self.whole) - len(self.known)

    def open(self) -> DraftContext:
        return DraftContext(self.seq_id, self.known, self.num_prompt, "", _GREEDY, 0, self.left - 1)

    def take(self, draft: Sequence[int]) -> int:
        """Accept the prefix of the draft that the text confirms, and one more token; returns that
        prefix's length.
        """
        future = self.whole[len(self.known) :]
        num = next((i for i, t in enumerate(draft) if t != future[i]), len(draft))
        self.known += future[: num + 1]
        return num


def replay(
    texts: Sequence[Text], lookup: Lookup, curve: StepTimeCurve, batch: int, most: int
) -> Replayed:
    """Replay `batch` texts at a time, replacing those that end.

    `curve` is modified as in service.
    """
    clock = _Clock()
    controller = DepthController(None, most, clock, lookup)
    controller.calibrate(curve)
    waiting = [_Sequence(i, text) for i, text in enumerate(texts) if len(text[0]) > text[1]]
    waiting.reverse()
    running: list[_Sequence] = []
    num_tokens = num_steps = 0
    plain_s = 0.0
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop())
        gave = _step(running, controller, curve, clock)
        plain_s += curve.seconds(len(running), len(running)) * gave / len(running)
        num_tokens, num_steps = num_tokens + gave, num_steps + 1
        for sequence in [sequence for sequence in running if not sequence.left]:
            running.remove(sequence)
            controller.forget(sequence.seq_id, sequence.known, "")
    return Replayed(
        num_tokens=num_tokens, num_steps=num_steps, seconds=clock.now_s, plain_s=plain_s
    )


def _step(
    running: Sequence[_Sequence], controller: DepthController, curve: StepTimeCurve, clock: _Clock
) -> int:
    """One step of all running texts; returns the number of tokens."""
    num = len(running)
    wants = controller.should_propose([_RUN] * num)
    able = [sequence for sequence in running if sequence.left > 1] if wants else []
    drafts = controller.propose(
        [sequence.open() for sequence in able], StepCapacity(num, num, 1 << 16)
    )
    of = {sequence.seq_id: draft for sequence, draft in zip(able, drafts, strict=True)}
    clock.now_s += curve.seconds(num, num + sum(map(len, drafts)))
    outcomes, gave = [], num
    for sequence in running:
        draft = of.get(sequence.seq_id, ())
        num_kept = sequence.take(draft)
        gave += num_kept
        if draft:
            outcomes.append(DraftOutcome(sequence.seq_id, len(draft), num_kept))
    controller.observe(outcomes)
    return gave
