"""Prompts among decodes: what a step takes by how many prompts are computed in it.

A step computes the next token of everybody who decodes, and prompts in the room that is left under
its token budget: a long prompt in several chunks, one a step; of short ones several in one step.
`seconds(x)` is the mean over steps that carry x chunks on average: a step carries a whole number of
them, so that it lies on lines between steps as they are priced (0, 1, 2, 4, 8, … chunks).

With pipeline stages as many micro-batches are under way, each at its own step, and nobody overtakes
in the pipeline: whoever follows a long step waits for it at every stage, so that a round of all of
them takes as long as its longest step. A rare prompt therefore delays all micro-batches; what the
stages add is that in one round each of them may carry prompts.
"""

from __future__ import annotations

import math

from scipy.special import pdtrc

from ridgeline.plan.step_time.replica import Replica

_RARE = 1e-3  # prompts of a step that are not worth the pricing of one with so many


class MixedSteps:
    """Steps of one attention group. `most`: chunks that fit one step, on average.

    `prompt`: tokens hit, tokens in all. `decoding`: sequences that decode beside it, and the tokens
    that each of them holds. `resting_s`: a step without prompts. `num_rounds`: micro-batches.
    """

    def __init__(
        self,
        machine: Replica,
        prompt: tuple[int, int],
        decoding: tuple[int, int],
        room: int,
        resting_s: float,
        num_rounds: int,
    ) -> None:
        self._machine, self._prompt, self._decoding = machine, prompt, decoding
        self._room, self.num_rounds = room, num_rounds
        cached, isl = prompt
        self.num_chunks = num_chunks(isl - cached, room)
        self.most = max_chunks(isl - cached, room)
        self._known = {0: resting_s}

    @property
    def prompt_s(self) -> float:
        """Seconds until the first token of a prompt that waits for nobody."""
        return self.num_chunks * self._priced(1)

    @property
    def added_s(self) -> float:
        """Of them, what its steps would not have taken without it."""
        return self.prompt_s - self.num_chunks * self._known[0]

    @property
    def least_s(self) -> float:
        """Of the device per prompt, where steps are full of them."""
        return self.num_chunks * self.seconds(self.most) / self.most

    def seconds(self, chunks: float) -> float:
        """Mean seconds of a step that carries so many chunks on average."""
        low = 0 if chunks < 1 else 2 ** int(math.log2(chunks))
        high = max(1, 2 * low)
        share = 1 - (1 - (chunks - low) / (high - low)) ** self.num_rounds
        return self._priced(low) + share * (self._priced(high) - self._priced(low))

    def arriving(self, chunks: float) -> float:
        """As `seconds`, where prompts come at random: a step carries a Poisson number of them. Long
        prompts queue for their turn, one chunk a step, and stay even."""
        if self.num_chunks > 1 or self.num_rounds > 1:
            return self.seconds(chunks)
        low, high = 0, 1
        found_s, slope_s = self._priced(0), 0.0
        beyond = chunks
        while beyond > _RARE:
            steeper_s = (self._priced(high) - self._priced(low)) / (high - low)
            found_s += (steeper_s - slope_s) * beyond
            slope_s, low, high = steeper_s, high, 2 * high
            beyond = float(chunks * pdtrc(low - 1, chunks) - low * pdtrc(low, chunks))
        return found_s

    def _priced(self, num_alike: int) -> float:
        """A step with so many chunks; the mean over the chunks of a prompt."""
        known = self._known.get(num_alike)
        if known is None:
            known = self._known[num_alike] = self._mean_of_chunks(num_alike)
        return known

    def _mean_of_chunks(self, num_alike: int) -> float:
        (at, isl), (others, held) = self._prompt, self._decoding
        took_s = 0.0
        while at < isl:
            new = min(self._room, isl - at)
            sampled = others + num_alike * (at + new == isl)
            runs = ((num_alike, new, at), (others, 1, held))
            took_s += self._machine.grouped(runs, sampled).seconds
            at += new
        # Without decodes a step of few tokens may cost less than one decode, which rests here.
        return max(took_s / self.num_chunks, self._known[0])


def num_chunks(new: int, room: int) -> int:
    """Steps that a prompt of `new` tokens takes."""
    return math.ceil(new / room)


def max_chunks(new: int, room: int) -> float:
    """Chunks of such prompts that a step holds, on average: at least one."""
    return room * num_chunks(new, room) / new
