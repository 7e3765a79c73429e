"""Time of steps that mix prompts and decodes, by the number of prompt chunks in a step.

A step computes the next token of every decoding sequence, and prompts in the rest of its token
budget: long prompts in several chunks, one per step, and several short prompts in one step.
`seconds(x)` is the mean over steps that carry x chunks on average. A step carries a whole number of
chunks, so the function interpolates linearly between priced steps (0, 1, 2, 4, 8, … chunks).

With pipeline stages, as many micro-batches are in flight, each at its own step, and none overtakes
another: a micro-batch behind a long step waits for it at every stage, so a round of all of them
takes as long as its longest step. A single prompt therefore delays all micro-batches; on the other
hand each of them can carry prompts in the same round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from scipy.special import betainc, pdtrc

from ridgeline.modelspec.cost.step import RunGroup
from ridgeline.plan.step_time.replica import Replica

_RARE = 1e-3  # expected chunks per step below which larger steps are not priced
_MAX_CARRIED = 0.98  # of a step's length, to the next


class MixedSteps:
    """Steps of one attention group.

    `prompt`: (cached tokens, all tokens). `decoding`: (number of decoding sequences, tokens in the
    cache of each). `room`: tokens per step that prompts can use. `decode_s`: seconds of a step
    without prompts. `num_rounds`: micro-batches. `copy_s`: seconds of copies from a tier of the KV
    cache for each prompt. `max_chunks`: mean number of chunks in full steps.
    """

    def __init__(
        self,
        machine: Replica,
        prompt: tuple[int, int],
        decoding: tuple[int, int],
        room: int,
        decode_s: float,
        num_rounds: int,
        copy_s: float = 0.0,
    ) -> None:
        self._machine, self._prompt, self._decoding = machine, prompt, decoding
        self._room, self.num_rounds, self.copy_s = room, num_rounds, copy_s
        cached, isl = prompt
        self.num_chunks = num_chunks(isl - cached, room)
        self.max_chunks = max_chunks(isl - cached, room)
        self._known = {0: decode_s}

    @property
    def prompt_s(self) -> float:
        """Seconds to the first token of a prompt that does not wait."""
        return self.num_chunks * self._priced(1)

    @property
    def added_s(self) -> float:
        """Seconds that a prompt adds to the steps that compute it."""
        return self.prompt_s - self.num_chunks * self._known[0]

    @property
    def least_s(self) -> float:
        """Device seconds per prompt when steps are full of prompts."""
        return self.num_chunks * self.seconds(self.max_chunks) / self.max_chunks

    def seconds(self, chunks: float) -> float:
        """Mean seconds of a step that carries `chunks` prompt chunks on average."""
        low = 0 if chunks < 1 else 2 ** int(math.log2(chunks))
        high = max(1, 2 * low)
        share = 1 - (1 - (chunks - low) / (high - low)) ** self.num_rounds
        return self._priced(low) + share * (self._priced(high) - self._priced(low))

    @property
    def holds_several(self) -> bool:
        """Whether a step holds several whole prompts, so that those of one step end together."""
        return self.num_chunks == 1 and self.num_rounds == 1 and self.max_chunks >= 2

    @property
    def another_s(self) -> float:
        """Seconds that one more prompt adds to a step that has one."""
        return self._priced(2) - self._priced(1)

    def poisson_seconds(self, chunks: float) -> float:
        """Like `seconds`, for random arrivals: a step carries those of the previous step.

        Their number is Poisson for a given length of that step, which itself depends on how many it
        carried; over all steps it is close to negative binomial. Prompts of several chunks queue,
        one chunk per step, which evens out the arrivals.
        """
        if self.num_chunks > 1 or self.num_rounds > 1:
            return self.seconds(chunks)
        step_s = self._mean_over_counts(chunks, 0.0)
        if not self.holds_several or not chunks:
            return step_s
        carried = min(_MAX_CARRIED, chunks / step_s * self.another_s)
        return self._mean_over_counts(chunks, carried)

    def _mean_over_counts(self, chunks: float, carried: float) -> float:
        """The mean over a random number of chunks with mean `chunks` and the variance of an
        autoregression with the coefficient `carried`: chunks / (1 - carried²)."""
        low, high = 0, 1
        mean_s, slope_s = self._priced(0), 0.0
        beyond = chunks
        while beyond > _RARE:
            steeper_s = (self._priced(high) - self._priced(low)) / (high - low)
            mean_s += (steeper_s - slope_s) * beyond
            slope_s, low, high = steeper_s, high, 2 * high
            beyond = _mean_beyond(low, chunks, carried)
        return mean_s

    def _priced(self, num_alike: int) -> float:
        """Seconds of a step with `num_alike` equal chunks; the mean over the chunks of a prompt."""
        known = self._known.get(num_alike)
        if known is None:
            known = self._known[num_alike] = self._mean_of_chunks(num_alike)
        return known

    def steps_of_prompt(self, num_alike: int = 1) -> Iterator[tuple[tuple[RunGroup, ...], int]]:
        """(groups of runs, sampled tokens) of the steps that compute `num_alike` equal prompts."""
        (at, isl), (others, held) = self._prompt, self._decoding
        while at < isl:
            new = min(self._room, isl - at)
            sampled = others + num_alike * (at + new == isl)
            yield ((num_alike, new, at), (others, 1, held)), sampled
            at += new

    def _mean_of_chunks(self, num_alike: int) -> float:
        steps = self.steps_of_prompt(num_alike)
        took_s = sum(self._machine.grouped(runs, sampled).seconds for runs, sampled in steps)
        took_s += num_alike * self.copy_s
        # Without decodes, a step of few tokens could be cheaper than the decode step.
        return max(took_s / self.num_chunks, self._known[0])


def _mean_beyond(limit: int, mean: float, carried: float) -> float:
    """E max(0, N - limit) of a negative binomial N of variance mean / (1 - carried²); Poisson at
    0."""
    if not carried:
        return float(mean * pdtrc(limit - 1, mean) - limit * pdtrc(limit, mean))
    kept = 1 - carried * carried
    size = mean * kept / (1 - kept)
    reach = 1 - betainc(size + 1, limit, kept)  # of the size-biased count
    return float(mean * reach - limit * (1 - betainc(size, limit + 1, kept)))


def num_chunks(new: int, room: int) -> int:
    """Number of steps that compute a prompt of `new` tokens."""
    return math.ceil(new / room)


def max_chunks(new: int, room: int) -> float:
    """Mean number of chunks of such prompts in a full step; at least one."""
    return room * num_chunks(new, room) / new
