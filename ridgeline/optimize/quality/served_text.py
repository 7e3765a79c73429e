"""The quality panel over the texts that a server answers, for servers that take no token ids.

What can be read differs between servers, and so do the checks:

  a scored text      the log-probability of every token of a held-out text, and with it the
                     perplexity; some servers add the likeliest tokens at every position
  a continuation     the greedy answer to a held-out text, with the likeliest tokens at every step.
                     Two servers are compared up to and including the first token that differs:
                     up to there both have read the same text
  questions          generated questions with one right answer, written freely

A distribution holds the likeliest tokens only; what they leave is one bucket, so a KL divergence of
two of them is a lower bound of the true one. The extreme quantile of the KL divergence, which the
panel over token ids judges, needs more positions than these and is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ridgeline.errors import CannotRun
from ridgeline.optimize.quality.task_questions import (
    TaskScore,
    TextQuestion,
    change_of_right_answers,
    is_mastered,
)
from ridgeline.optimize.quality.text_comparison import AGREEMENT, KL_MEAN, PERPLEXITY, TextSummary
from ridgeline.optimize.quality.thresholds import (
    PanelSize,
    QualityLimits,
    ThresholdCheck,
    check_max,
    check_min,
)
from ridgeline.stats import LEVEL, Interval, mean_interval, ratio_interval

CONTINUED_TOKENS = 16
ANSWER_TOKENS = 4
SMALLEST = 1e-9

Distribution = dict[str, float]
"""Token → log-probability, of the likeliest tokens."""


class ScoredToken(msgspec.Struct, frozen=True, kw_only=True):
    """One position of a text: its token, the log-probability, and the likeliest tokens there."""

    token: str
    logprob: float
    top: Distribution


class TextSource(Protocol):
    """A server, asked about texts. Each method raises CannotRun if the server cannot do it."""

    def score_text(self, text: str) -> list[ScoredToken]:
        """Every token of a text after the first."""
        ...

    def continuation(self, text: str, num_tokens: int) -> list[ScoredToken]:
        """The greedy continuation of a text."""
        ...

    def answer(self, text: str, max_tokens: int) -> tuple[list[str], list[float]]:
        """Token texts of the greedy continuation, and nats between the best two tokens of each."""
        ...


def truncated_kl(before: Distribution, after: Distribution) -> float:
    """KL(before || after) in nats over the tokens that both name and one bucket for the rest.

    A lower bound of the divergence of the whole distributions.
    """
    shared = before.keys() & after.keys()
    pairs = [(math.exp(before[token]), math.exp(after[token])) for token in shared]
    if shared:
        p_rest, q_rest = (max(SMALLEST, 1.0 - sum(column)) for column in zip(*pairs, strict=True))
        pairs = [*pairs, (p_rest, q_rest)]
    else:
        # The likeliest tokens of one are in the rest of the other, and have at most all of it.
        named = min(1.0, sum(math.exp(value) for value in before.values()))
        rest = max(SMALLEST, 1.0 - sum(math.exp(value) for value in after.values()))
        if named <= rest:
            return 0.0
        pairs = [(named, rest), (max(SMALLEST, 1 - named), max(SMALLEST, 1 - rest))]
    total = sum(p * math.log(p / max(q, SMALLEST)) for p, q in pairs if p > 0)
    return max(0.0, total)


def best_token(top: Distribution) -> str:
    """The likeliest token."""
    return max(top, key=lambda token: top[token])


class ServedText(msgspec.Struct, frozen=True, kw_only=True):
    """What one server said about a text. `scored` is empty where it does not score texts."""

    scored: tuple[ScoredToken, ...]
    continued: tuple[ScoredToken, ...]


def read_text(source: TextSource, text: str) -> ServedText:
    """Score a text, and continue it if the scores come without the likeliest tokens.

    Raises CannotRun if the server can do neither.
    """
    try:
        scored = tuple(source.score_text(text))
    except CannotRun:
        scored = ()
    if scored and any(row.top for row in scored):
        return ServedText(scored=scored, continued=())
    try:
        continued = tuple(source.continuation(text, CONTINUED_TOKENS))
    except CannotRun:
        if not scored:
            raise
        continued = ()
    return ServedText(scored=scored, continued=continued)


class ServedComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the positions of one text.

    `num_scored` positions have log-probabilities of the text; `num_compared` have distributions.
    """

    num_scored: int
    nll_before: float
    nll_after: float
    num_compared: int
    kl: float
    same_top: int


def compare_served(before: ServedText, after: ServedText) -> ServedComparison:
    """One text as two servers see it. A text that they tokenise differently has no positions."""
    scored = list(zip(before.scored, after.scored, strict=False))
    if [row.token for row in before.scored] != [row.token for row in after.scored]:
        scored = []
    tops = [(x.top, y.top) for x, y in scored if x.top and y.top]
    if not tops:
        for x, y in zip(before.continued, after.continued, strict=False):
            if x.top and y.top:
                tops.append((x.top, y.top))
            if x.token != y.token:
                break
    return ServedComparison(
        num_scored=len(scored),
        nll_before=-sum(x.logprob for x, _ in scored),
        nll_after=-sum(y.logprob for _, y in scored),
        num_compared=len(tops),
        kl=sum(truncated_kl(x, y) for x, y in tops),
        same_top=sum(best_token(x) == best_token(y) for x, y in tops),
    )


class ServedReference:
    """The original's answers, each read once, until `freeze`."""

    def __init__(
        self, texts: Sequence[str], questions: Sequence[TextQuestion], source: TextSource
    ) -> None:
        self._texts, self._questions, self._source = texts, questions, source
        self._read: list[ServedText] = []
        self._right: list[bool] = []
        self._frozen = False
        self.asks_questions = True

    def advance(self, look: int, size: PanelSize) -> None:
        """Read everything that a look needs at once: a server with a single address restarts when
        the other configuration is asked."""
        self.texts(size.first_windows << look)
        if self.asks_questions:
            self.questions(size.first_items << look)

    def texts(self, count: int) -> list[tuple[str, ServedText]]:
        """Up to `count` texts with what the original says of them."""
        count = min(count, len(self._texts))
        while not self._frozen and len(self._read) < count:
            self._read.append(read_text(self._source, self._texts[len(self._read)]))
        return list(zip(self._texts, self._read[:count], strict=False))

    def questions(self, count: int) -> list[tuple[TextQuestion, bool]]:
        """Up to `count` questions, and whether the original answers them rightly."""
        count = min(count, len(self._questions))
        while not self._frozen and len(self._right) < count:
            self._right.append(is_right(self._source, self._questions[len(self._right)]))
        return list(zip(self._questions, self._right[:count], strict=False))

    def read_with(self, source: TextSource) -> None:
        """Ask another server, with the same model, from now on."""
        self._source = source

    def freeze(self) -> None:
        """The original is no longer available: only answers already read are known."""
        self._frozen = True


def is_right(source: TextSource, question: TextQuestion) -> bool:
    """Whether the server's greedy answer begins with the right option."""
    texts, _ = source.answer(question.prompt, ANSWER_TOKENS)
    answer = re.match(r"\s*(\w+)", "".join(texts))
    return answer is not None and answer[1] == question.options[question.right].strip()


def text_checks(
    rows: Sequence[ServedComparison], limits: QualityLimits, level: float = LEVEL
) -> tuple[ThresholdCheck, ...]:
    """Every threshold for which the servers return what it needs; intervals are over texts."""
    checks = []
    changes = _means(rows, lambda row: row.nll_after - row.nll_before)
    if len(changes) > 1:
        ratio = ratio_interval(changes, level=level)
        checks.append(check_max(PERPLEXITY, ratio, limits.perplexity_ratio_max))
    kl = _per_position(rows, lambda row: row.kl)
    if len(kl) > 1:
        same = mean_interval(_per_position(rows, lambda row: row.same_top), level=level)
        checks.append(check_max(KL_MEAN, mean_interval(kl, level=level), limits.kl_mean_max))
        checks.append(check_min(AGREEMENT, same, limits.greedy_agreement_min))
    return tuple(checks)


def _per_position(
    rows: Sequence[ServedComparison], total: Callable[[ServedComparison], float]
) -> list[float]:
    """One value per text, whose mean is the total over all positions by their number.

    A continuation is compared up to its first difference, so a text with an early one has few
    positions: the mean of the texts' own shares would count that difference as often as a whole
    text without any. The values are the ratio estimate with each text's residual (Cochran,
    "Sampling Techniques", section 6), so their spread is that of the ratio.
    """
    pairs = [(total(row), row.num_compared) for row in rows if row.num_compared]
    if not pairs:
        return []
    positions = sum(count for _, count in pairs)
    ratio = sum(value for value, _ in pairs) / positions
    mean_count = positions / len(pairs)
    return [ratio + (value - ratio * count) / mean_count for value, count in pairs]


def _means(
    rows: Sequence[ServedComparison], total: Callable[[ServedComparison], float]
) -> list[float]:
    """The mean over its scored positions of each text that has any."""
    return [total(row) / row.num_scored for row in rows if row.num_scored]


class ServedTextPart:
    """Held-out texts as a part of the panel."""

    def __init__(
        self,
        reference: ServedReference,
        source: TextSource,
        limits: QualityLimits,
        size: PanelSize,
    ) -> None:
        self._reference, self._source = reference, source
        self._limits, self._size = limits, size
        self._rows: list[ServedComparison] = []

    def read(self, look: int) -> bool:
        """Read as far as look number `look` (from 0) requires; False if the texts have ended."""
        self._reference.advance(look, self._size)
        wanted = self._size.first_windows << look
        known = self._reference.texts(wanted)
        for text, before in known[len(self._rows) :]:
            self._rows.append(compare_served(before, read_text(self._source, text)))
        return len(known) == wanted

    def checks(self, level: float) -> tuple[ThresholdCheck, ...]:
        """Every threshold for which the servers return what it needs."""
        return text_checks(self._rows, self._limits, level)

    def summary(self) -> TextSummary:
        """The figures to show; perplexities only where the servers score texts."""
        before, after = (
            _means(self._rows, nll)
            for nll in (lambda row: row.nll_before, lambda row: row.nll_after)
        )
        positions = sum(row.num_compared for row in self._rows)
        return TextSummary(
            perplexity_before=_perplexity(before),
            perplexity_after=_perplexity(after),
            num_positions=max(positions, sum(row.num_scored for row in self._rows)),
            num_windows=len(self._rows),
            num_flips=positions - sum(row.same_top for row in self._rows),
        )


def _perplexity(nll: Sequence[float]) -> Interval | None:
    return ratio_interval(nll) if len(nll) > 1 else None


class ServedQuestionsPart:
    """Questions as a part of the panel; without a check if the original is at chance."""

    def __init__(
        self,
        reference: ServedReference,
        source: TextSource,
        limits: QualityLimits,
        size: PanelSize,
    ) -> None:
        self._reference, self._source = reference, source
        self._limits, self._size = limits, size
        self._right: list[bool] = []
        first = reference.questions(size.first_items)
        self._chance = sum(1 / len(q.options) for q, _ in first) / max(1, len(first))
        self._mastered = bool(first) and is_mastered([right for _, right in first], self._chance)
        reference.asks_questions = self._mastered

    def read(self, look: int) -> bool:
        """Ask as many questions as look number `look` requires."""
        if not self._mastered:
            return False
        wanted = self._size.first_items << look
        known = self._reference.questions(wanted)
        for question, _ in known[len(self._right) :]:
            self._right.append(is_right(self._source, question))
        return len(known) == wanted

    def checks(self, level: float) -> tuple[ThresholdCheck, ...]:
        """The change of the share of right answers, paired by question."""
        changes = self._changes()
        if not self._mastered or not changes:
            return ()
        change = change_of_right_answers(changes, level)
        return (check_min("right answers, change", change, -self._limits.task_drop_max),)

    def _changes(self) -> list[float]:
        known = self._reference.questions(len(self._right))
        return [float(new) - float(old) for (_, old), new in zip(known, self._right, strict=True)]

    def scores(self) -> tuple[TaskScore, ...]:
        """The scores to show."""
        count = len(self._right) or self._size.first_items
        known = self._reference.questions(count)
        score = TaskScore(
            name="questions",
            num_items=len(known),
            chance=self._chance,
            right_before=sum(right for _, right in known) / max(1, len(known)),
            right_after=sum(self._right) / max(1, len(known)) if self._mastered else None,
            num_flips=sum(change != 0 for change in self._changes()),
        )
        return (score,)
