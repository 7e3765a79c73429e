"""Compares the answers of two servers that run: the same texts to both, paired.

Nothing is known of the models but their addresses, so texts go over the wire, not token ids.
Measured: held-out perplexity and KL divergence where the server scores texts, else the distribution
of the next token at the ends of held-out texts; generated questions with one right answer; greedy
continuations; and the user's own command. The floor is A against itself a second time: the effect
of batching and rounding alone on that server.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import msgspec

from ridgeline.errors import DECODE_ERRORS, CannotRun
from ridgeline.http_replies import open_reply
from ridgeline.measure.client.http_target import authorization
from ridgeline.optimize.drivers.server_process import models_url
from ridgeline.optimize.external.scoring import ServerScorer
from ridgeline.optimize.quality import GateVerdict, ThresholdCheck, load_quality_limits
from ridgeline.optimize.quality.greedy_divergence import first_difference
from ridgeline.optimize.quality.served_text import (
    ServedComparison,
    compare_served,
    is_right,
    read_text,
    text_checks,
)
from ridgeline.optimize.quality.task_questions import change_of_right_answers, text_questions
from ridgeline.optimize.quality.thresholds import check_min, worst_verdict
from ridgeline.optimize.quality.user_evaluation import REPEATS, Score, judge_scores
from ridgeline.records.progress import Observer, silent, stage
from ridgeline.report.json_line import plain
from ridgeline.report.result import Result
from ridgeline.stats import Interval, mean_interval
from ridgeline.workflows.evaluate.eval_command import check_command, run_evaluation
from ridgeline.workflows.evaluate.heldout_text import heldout_pieces
from ridgeline.workflows.load.twin_servers import read_twin
from ridgeline.workflows.run_async import run_async

TEXT_CHARS = 600  # of one held-out text, the unit of the intervals
MIN_TEXTS, MAX_TEXTS = 8, 96
QUESTIONS, PROMPTS, ANSWER_TOKENS = 90, 24, 48
NEAR_TIE_NATS = 0.1


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
    """B against A. `unmeasured`: what the servers do not allow, with the reason.

    `twins`: what a server that is a twin says of itself, else "".
    """

    a: str
    b: str
    kinds: tuple[str, str]
    twins: tuple[str, str] = ("", "")
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
            checks += text_checks(rows, limits)
            floor += text_checks(again, limits)
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
        twins=(_twin(a), _twin(b)),
        num_texts=num_texts,
        checks=tuple(checks),
        floor=tuple(floor),
        greedy=greedy,
        unmeasured=unmeasured,
        verdict=worst_verdict(check.verdict for check in checks),
    )


# ---- the servers -------------------------------------------------------------------------------


def _scorer(server: ServerToCompare) -> ServerScorer:
    model = server.model
    if model is None:
        try:
            model = str(_get(models_url(server.url), server.api_key)["data"][0]["id"])
        except (urllib.error.HTTPError, ValueError, LookupError, TypeError) as error:
            raise CannotRun(
                "the server lists no models", value=server.url, fix=str(error)
            ) from None
        except OSError as error:
            raise CannotRun(
                "the server does not answer",
                value=server.url,
                fix=f"start it or correct --url ({error})",
            ) from None
    kind = server.kind or recognise_server(server.url, server.api_key)
    return ServerScorer(server.url, model, kind, server.api_key)


def _twin(server: ServerToCompare) -> str:
    return str(read_twin(server.url, server.api_key) or "")


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
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    for path, kind, key in pages:
        try:
            if key in _get(root + path, api_key) or not key:
                return kind
        except (OSError, ValueError):
            continue
    return "openai"


def _get(url: str, api_key: str | None) -> dict[str, Any]:
    """The JSON object of a page. Raises OSError, and ValueError if it is none."""
    request = urllib.request.Request(url, headers=authorization(api_key))
    with open_reply(request, 10) as reply:
        try:
            document = json.load(reply)
        except DECODE_ERRORS as error:
            raise ValueError(f"the page is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError("the page is not a JSON object")
    return document


# ---- held-out text -----------------------------------------------------------------------------


def _compare_texts(
    first: ServerScorer, second: ServerScorer, budget_s: float
) -> tuple[list[ServedComparison], list[ServedComparison]]:
    """B against A, and A against itself on a quarter of the texts."""
    rows: list[ServedComparison] = []
    again: list[ServedComparison] = []
    stop_s = time.monotonic() + budget_s
    for number, text in enumerate(heldout_pieces(TEXT_CHARS, MAX_TEXTS)):
        if number >= MIN_TEXTS and time.monotonic() > stop_s:
            break
        before = read_text(first, text)
        rows.append(compare_served(before, read_text(second, text)))
        if number % 4 == 0:
            again.append(compare_served(before, read_text(first, text)))
    return rows, again


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
        before, after = (is_right(server, question) for server in (first, second))
        right += before
        changes.append(float(after) - float(before))
    return change_of_right_answers(changes), right


def _compare_greedy(first: ServerScorer, second: ServerScorer, budget_s: float) -> GreedyAnswers:
    stop_s = time.monotonic() + budget_s
    same: list[float] = []
    floor: list[float] = []
    ties = 0
    for number, text in enumerate(heldout_pieces(TEXT_CHARS, MAX_TEXTS)):
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
    check_command(command)

    async def scores(url: str) -> list[Score]:
        return [await run_evaluation(command, url) for _ in range(REPEATS)]

    before = run_async(scores(a))
    known = [score for score in before if score is not None]
    if len(known) < len(before):
        raise CannotRun("--eval-cmd fails on A", value=command.replace("{url}", a))
    return judge_scores(known, run_async(scores(b)), margin)
