"""A language model without weights: the next token is a hash of the tokens before it.

Each context has 20 candidates with log-probabilities, derived from (seed, last token, position).
The same context therefore always gives the same distribution, however requests are batched, so that
greedy answers, log-probabilities and prompt log-probabilities of two servers can be compared. A
format's loss is imitated by Gaussian noise on the candidates' log-probabilities.

Answers have the length that was requested. Without a limit, an answer ends at a length drawn from
an exponential distribution with a mean of `MEAN_OUTPUT` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.engine.tokenization.tokenizer import Tokenizer
from ridgeline.records import TokenLogprobs

NUM_CANDIDATES = 20
MEAN_OUTPUT, MIN_OUTPUT = 256, 8
MAX_VOCABULARY = 1 << 15
_SPREAD = 0.35  # nats between neighbouring candidates
_TAIL = 0.05  # probability of all other tokens together
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A 64-bit hash (splitmix64's finaliser over each number)."""
    x = 0x9E3779B97F4A7C15
    for number in numbers:
        x = (x ^ number) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
        x ^= x >> 31
    return x


def _unit(x: int) -> float:
    """A hash as a number in (0, 1)."""
    return ((x >> 11) + 0.5) / (1 << 53)


class SyntheticModel:
    """Draws tokens among `words`, the ordinary tokens of a vocabulary.

    `ends`: end-of-sequence tokens. `noise_nats`: standard deviation of the noise on the
    log-probabilities; with another `format_seed` the noise is another one.
    """

    def __init__(
        self,
        words: Sequence[int],
        ends: Sequence[int],
        seed: int = 0,
        *,
        noise_nats: float = 0.0,
        format_seed: int = 1,
    ) -> None:
        self._words = words[: _prime_up_to(len(words))]
        self._ends, self._seed = tuple(ends), seed
        self._noise_nats, self._format_seed = noise_nats, format_seed

    def next_token(self, last: int, position: int, point: SamplePoint) -> int:
        """The token that follows `last`, which stands at `position`."""
        if self.ends_here(point):
            return self._ends[0]
        context = mix(self._seed, last, position)
        if point.sampling.greedy:
            if self._noise_nats:
                scores = self._scores(context)
                return self._candidate(context, scores.index(max(scores)))
            return self._candidate(context, 0)
        draw = _unit(mix(point.seed, point.index))
        rank = min(int(-math.log(draw) * point.sampling.temperature / 0.7), NUM_CANDIDATES - 1)
        return self._candidate(context, rank)

    def ends_here(self, point: SamplePoint) -> bool:
        """Whether an answer without a limit ends with this token."""
        sampling = point.sampling
        if sampling.max_tokens is not None or sampling.ignore_eos or not self._ends:
            return False
        length = MIN_OUTPUT - MEAN_OUTPUT * math.log(_unit(mix(point.seed, self._seed)))
        return point.index + 1 >= length and self._ends[0] not in point.banned

    def logprobs(self, last: int, position: int, token: int, num_top: int) -> TokenLogprobs:
        """The log-probabilities after `last` of `token`, and of the `num_top` likeliest ones."""
        context = mix(self._seed, last, position)
        scores = self._scores(context)
        total = math.log(sum(map(math.exp, scores))) - math.log1p(-_TAIL)
        rows = [(self._candidate(context, k), scores[k] - total) for k in range(len(scores))]
        rows.sort(key=lambda row: -row[1])
        for rank, (candidate, logprob) in enumerate(rows, 1):
            if candidate == token:
                return TokenLogprobs(token, logprob, rank, tuple(rows[:num_top]))
        rest = math.log(_TAIL / max(1, len(self._words) - len(rows)))
        return TokenLogprobs(
            token, rest + self._noise(context, token), len(rows) + 1, tuple(rows[:num_top])
        )

    def _candidate(self, context: int, rank: int) -> int:
        words = self._words
        stride = 1 + (context >> 32) % max(1, len(words) - 1)
        return words[(context + rank * stride) % len(words)]

    def _scores(self, context: int) -> list[float]:
        """Unnormalised log-probabilities of the candidates; the first leads by a random margin."""
        margin = -1.5 * math.log(_unit(mix(context, 1)))
        number = min(NUM_CANDIDATES, len(self._words))
        scores = [0.0, *(-margin - _SPREAD * k for k in range(number - 1))]
        if self._noise_nats:
            scores = [score + self._noise(context, k) for k, score in enumerate(scores)]
        return scores

    def _noise(self, context: int, index: int) -> float:
        """Gaussian noise (Box-Muller), a function of context and index."""
        if not self._noise_nats:
            return 0.0
        first = _unit(mix(context, index, self._format_seed))
        second = _unit(mix(context, index, self._format_seed, 1))
        return self._noise_nats * math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second)


def ordinary_tokens(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Tokens that decode to a word; without texts, any token."""
    size = min(vocab_size, MAX_VOCABULARY)
    pieces = ((token, tokenizer.bytes_of(token)) for token in range(size))
    words = [token for token, piece in pieces if _is_word(piece)]
    return words if len(words) > NUM_CANDIDATES else list(range(3, size))


def _is_word(piece: bytes) -> bool:
    return piece[:1] == b" " and len(piece) > 2 and piece[1:].isalpha()


def _prime_up_to(number: int) -> int:
    """The largest prime up to `number`: every stride then visits all words."""
    for candidate in range(number, 2, -1):
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            return candidate
    return max(1, number)
