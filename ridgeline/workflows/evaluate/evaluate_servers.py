"""Compares the answers of two servers that run: the same texts to both, paired.

Nothing is known of the models but their addresses, so texts go over the wire, not token ids.
Measured: held-out perplexity and KL divergence where the server scores texts, else the distribution
of the next token at the ends of held-out texts; generated questions with one right answer; greedy
continuations; and the user's own command. The floor is A against itself a second time: the effect
of batching and rounding alone on that server.
"""

from __future__ import annotations

import json
import math
import random
import re
import shlex
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ridgeline.errors import BadInput, CannotRun
from ridgeline.measure.client.http_target import authorization
from ridgeline.optimize.drivers.server_process import models_url
from ridgeline.optimize.drivers.shell import run
from ridgeline.optimize.external.scoring import (
    Distribution,
    ServerScorer,
    best_token,
    truncated_kl,
)
from ridgeline.optimize.quality import GateVerdict, ThresholdCheck, load_quality_limits
from ridgeline.optimize.quality.greedy_divergence import first_difference
from ridgeline.optimize.quality.task_questions import TextQuestion, text_questions
from ridgeline.optimize.quality.text_comparison import AGREEMENT, KL_MEAN, PERPLEXITY
from ridgeline.optimize.quality.thresholds import check_max, check_min
from ridgeline.records.progress import Observer, silent, stage
from ridgeline.report.json_line import plain
from ridgeline.report.result import Result
from ridgeline.stats import Interval, mean_interval, ratio_interval
from ridgeline.workflows.evaluate.heldout_text import heldout_texts

TEXT_CHARS = 600  # of one held-out text, the unit of the intervals
MIN_TEXTS, MAX_TEXTS = 8, 96
QUESTIONS, PROMPTS, ANSWER_TOKENS = 90, 24, 48
NEAR_TIE_NATS = 0.1
COMMAND_REPEATS = 3
COMMAND_TIMEOUT_S = 3600.0
_WORST_FIRST: tuple[GateVerdict, ...] = ("fail", "inconclusive", "pass")


class ServerToCompare(msgspec.Struct, frozen=True, kw_only=True):
    """An address, what kind of server answers there (None: recognised), and how to ask it."""

    url: str
    kind: str | None = None
    model: str | None = None
    api_key: str | None = None


class GreedyAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy continuations.

    `same`: share of tokens before the first difference that is no near tie; `same_floor`: the same
    of A against itself.
    """

    num_prompts: int
    same: Interval
    same_floor: Interval
    num_near_ties: int


class ServerEvaluation(Result, frozen=True, kw_only=True):
    """B against A. `unmeasured`: what the servers do not allow, with the reason."""

    a: str
    b: str
    kinds: tuple[str, str]
    num_texts: int
    checks: tuple[ThresholdCheck, ...]
    floor: tuple[ThresholdCheck, ...]
    greedy: GreedyAnswers | None
    unmeasured: dict[str, str]
    verdict: GateVerdict

    def to_dict(self) -> dict[str, Any]:
        return dict(plain(self))


def evaluate_servers(
    a: ServerToCompare,
    b: ServerToCompare,
    *,
    budget_s: float = 120.0,
    command: str | None = None,
    margin: float = 0.0,
    observer: Observer = silent,
) -> ServerEvaluation:
    """Compare two servers. `command` is run with `{url}` of each; its score may drop by `margin`.

    Raises CannotRun if a server does not answer.
    """
    first, second = _scorer(a), _scorer(b)
    limits, _ = load_quality_limits()
    unmeasured: dict[str, str] = {}
    checks: list[ThresholdCheck] = []
    floor: list[ThresholdCheck] = []
    num_texts = 0
    with stage(observer, "reading held-out text on both servers"):
        try:
            rows, again = _compare_texts(first, second, budget_s / 2)
            num_texts = len(rows)
            checks += _text_checks(rows)
            floor += _text_checks(again)
        except CannotRun as error:
            unmeasured["held-out text"] = str(error)
    with stage(observer, "asking questions with one right answer"):
        changes, right = _compare_questions(first, second, budget_s / 4)
        if right:
            drop = check_min("right answers, change", changes, -limits.task_drop_max)
            checks.append(drop)
        else:
            unmeasured["questions"] = "A answers none of them rightly"
    greedy = None
    with stage(observer, "comparing greedy answers"):
        try:
            greedy = _compare_greedy(first, second, budget_s / 4)
        except CannotRun as error:
            unmeasured["greedy answers"] = str(error)
    if command is not None:
        with stage(observer, "running the evaluation command"):
            checks.append(compare_by_command(command, a.url, b.url, margin))
    return ServerEvaluation(
        a=a.url,
        b=b.url,
        kinds=(first.kind, second.kind),
        num_texts=num_texts,
        checks=tuple(checks),
        floor=tuple(floor),
        greedy=greedy,
        unmeasured=unmeasured,
        verdict=_verdict(checks),
    )


def _verdict(checks: Sequence[ThresholdCheck]) -> GateVerdict:
    verdicts = {check.verdict for check in checks}
    return next((worst for worst in _WORST_FIRST if worst in verdicts), "inconclusive")


# ---- the servers -------------------------------------------------------------------------------


def _scorer(server: ServerToCompare) -> ServerScorer:
    model = server.model
    if model is None:
        try:
            model = str(_get(models_url(server.url), server.api_key)["data"][0]["id"])
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise CannotRun(
                "the server lists no models", value=server.url, fix=str(error)
            ) from None
    kind = server.kind or recognise_server(server.url, server.api_key)
    return ServerScorer(server.url, model, kind, server.api_key)


def recognise_server(url: str, api_key: str | None = None) -> str:
    """The kind of a server by a page that only it has; `openai` for any other."""
    root = models_url(url).removesuffix("/v1/models")
    pages = (
        ("/props", "llama-server", "default_generation_settings"),
        ("/get_server_info", "sglang", ""),
        ("/info", "tgi", "max_total_tokens"),
    )
    try:
        owner = _get(models_url(url), api_key)["data"][0].get("owned_by", "")
        if owner in ("vllm", "ridgeline", "sglang"):
            return str(owner)
    except (OSError, ValueError, KeyError, IndexError):
        pass
    for path, kind, key in pages:
        try:
            if key in _get(root + path, api_key) or not key:
                return kind
        except (OSError, ValueError):
            continue
    return "openai"


def _get(url: str, api_key: str | None) -> dict[str, Any]:
    request = urllib.request.Request(url, headers=authorization(api_key))
    with urllib.request.urlopen(request, timeout=10) as reply:
        return dict(json.load(reply))


# ---- held-out text -----------------------------------------------------------------------------


class ComparedText(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the positions of one text; None where a server does not return it."""

    nll_change: float | None
    kl: float | None
    agreement: float | None


def _compare_texts(
    first: ServerScorer, second: ServerScorer, budget_s: float
) -> tuple[list[ComparedText], list[ComparedText]]:
    """B against A, and A against itself on a quarter of the texts."""
    rows: list[ComparedText] = []
    again: list[ComparedText] = []
    stop_s = time.monotonic() + budget_s
    for number, text in enumerate(_texts()):
        if number >= MIN_TEXTS and time.monotonic() > stop_s:
            break
        rows.append(_compare_text(first, second, text))
        if number % 4 == 0:
            again.append(_compare_text(first, first, text))
    return rows, again


def _texts() -> Iterator[str]:
    """Pieces of the held-out texts, their kinds alternating, each kind in random order."""
    pieces = []
    for kind, text in sorted(heldout_texts().items()):
        starts = list(range(0, len(text) - TEXT_CHARS, TEXT_CHARS))
        random.Random(kind).shuffle(starts)
        pieces.append([text[start : start + TEXT_CHARS] for start in starts])
    for number, row in enumerate(zip(*pieces, strict=False)):
        if number * len(row) >= MAX_TEXTS:
            return
        yield from row


def _compare_text(first: ServerScorer, second: ServerScorer, text: str) -> ComparedText:
    try:
        before, after = first.score_text(text), second.score_text(text)
    except CannotRun:
        # No position inside a text: the next token after it stands for all.
        return _compare_next(first.next_token(text), second.next_token(text))
    nll = sum(row.logprob for row in before) - sum(row.logprob for row in after)
    same_tokens = [row.token for row in before] == [row.token for row in after]
    pairs = [(x.top, y.top) for x, y in zip(before, after, strict=False) if x.top and y.top]
    if not same_tokens or not pairs:
        return ComparedText(nll_change=nll / len(before), kl=None, agreement=None)
    return ComparedText(
        nll_change=nll / len(before),
        kl=_mean(truncated_kl(x, y) for x, y in pairs),
        agreement=_mean(float(best_token(x) == best_token(y)) for x, y in pairs),
    )


def _compare_next(before: Distribution, after: Distribution) -> ComparedText:
    same = best_token(before) == best_token(after)
    kl = truncated_kl(before, after)
    return ComparedText(nll_change=None, kl=kl, agreement=float(same))


def _mean(values: Iterator[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _text_checks(rows: Sequence[ComparedText]) -> list[ThresholdCheck]:
    limits, _ = load_quality_limits()
    checks = []
    nll = [row.nll_change for row in rows if row.nll_change is not None]
    kl = [row.kl for row in rows if row.kl is not None]
    same = [row.agreement for row in rows if row.agreement is not None]
    if len(nll) > 1:
        checks.append(check_max(PERPLEXITY, ratio_interval(nll), limits.perplexity_ratio_max))
    if len(kl) > 1:
        checks.append(check_max(KL_MEAN, mean_interval(kl), limits.kl_mean_max))
    if len(same) > 1:
        checks.append(check_min(AGREEMENT, mean_interval(same), limits.greedy_agreement_min))
    return checks


# ---- questions and greedy answers --------------------------------------------------------------


def _compare_questions(
    first: ServerScorer, second: ServerScorer, budget_s: float
) -> tuple[Interval, int]:
    """The paired change of right answers, and how many A has."""
    stop_s = time.monotonic() + budget_s
    changes: list[float] = []
    right = 0
    for number, question in enumerate(text_questions(QUESTIONS)):
        if number >= 3 * MIN_TEXTS and time.monotonic() > stop_s:
            break
        before, after = (_is_right(server, question) for server in (first, second))
        right += before
        changes.append(float(after) - float(before))
    # With hardly any flips the spread cannot come from them alone: at least one more is assumed.
    least_sd = 1 / math.sqrt(len(changes))
    return mean_interval(changes, least_sd=least_sd), right


def _is_right(server: ServerScorer, question: TextQuestion) -> bool:
    texts, _ = server.answer(question.prompt, 4)
    answer = re.match(r"\s*(\w+)", "".join(texts))
    return answer is not None and answer[1] == question.options[question.right].strip()


def _compare_greedy(first: ServerScorer, second: ServerScorer, budget_s: float) -> GreedyAnswers:
    stop_s = time.monotonic() + budget_s
    same: list[float] = []
    floor: list[float] = []
    ties = 0
    for number, text in enumerate(_texts()):
        if number >= PROMPTS or (number >= MIN_TEXTS and time.monotonic() > stop_s):
            break
        reference = first.answer(text, ANSWER_TOKENS)
        share, tie = _same_share(reference, second.answer(text, ANSWER_TOKENS)[0])
        same.append(share)
        ties += tie
        floor.append(_same_share(reference, first.answer(text, ANSWER_TOKENS)[0])[0])
    return GreedyAnswers(
        num_prompts=len(same),
        same=mean_interval(same),
        same_floor=mean_interval(floor),
        num_near_ties=ties,
    )


def _same_share(
    reference: tuple[list[str], list[float]], other: Sequence[str]
) -> tuple[float, bool]:
    """Share of tokens before the answers part, and whether they part at a near tie, which counts as
    agreement."""
    texts, margins = reference
    ids = {text: number for number, text in enumerate(dict.fromkeys([*texts, *other]))}
    place = first_difference([ids[text] for text in texts], [ids[text] for text in other])
    if place >= len(texts):
        return 1.0, False
    if place < len(margins) and margins[place] < NEAR_TIE_NATS:
        return 1.0, True
    return place / max(1, len(texts)), False


# ---- the user's command ------------------------------------------------------------------------


def compare_by_command(command: str, a: str, b: str, margin: float) -> ThresholdCheck:
    """B against A by a command with `{url}`, run several times on each.

    Its last line may be a number, or JSON with "score"; more is better. Without one its exit code
    decides: 0 passes. Raises BadInput, and CannotRun if it fails on A.
    """
    if "{url}" not in command:
        raise BadInput("--eval-cmd has no {url}", value=command, fix="pytest evals --url {url}")
    before = [_score_of(command, a) for _ in range(COMMAND_REPEATS)]
    if any(score is None for score in before):
        raise CannotRun("--eval-cmd fails on A", value=command.replace("{url}", a))
    after = [_score_of(command, b) for _ in range(COMMAND_REPEATS)]
    changes = [
        -math.inf if new is None else new - old
        for old, new in zip(before, after, strict=True)
        if old is not None
    ]
    name = f"--eval-cmd, change (margin {margin:g})"
    if -math.inf in changes:
        failed = Interval(low=-1.0, mid=-1.0, high=-1.0)
        return ThresholdCheck(name=name, measured=failed, limit=-margin, verdict="fail")
    return check_min(name, mean_interval(changes), -margin)


def _score_of(command: str, url: str) -> float | None:
    """The score that the command prints; 1 without one; None if it fails."""
    words = [word.replace("{url}", url) for word in shlex.split(command)]
    try:
        output = run(words, timeout_s=COMMAND_TIMEOUT_S)
    except CannotRun:
        return None
    return printed_score(output)


def printed_score(output: str) -> float:
    """The number in the last line, or its JSON's "score"; 1 without either."""
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        return 1.0
    score = value.get("score") if isinstance(value, dict) else value
    return float(score) if isinstance(score, int | float) and not isinstance(score, bool) else 1.0
