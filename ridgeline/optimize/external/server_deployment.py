"""One configuration of an external server as a `Deployment`, over HTTP.

Prompts go as token ids to /v1/completions, so both sides and the simulator receive the same ones.
A server that takes no token ids gets their text, and one that only chats gets messages; what it
accepts is asked once per start.
Steps stay unknown: diagnosis uses what clients see. Distributions are read as `prompt_logprobs`
where the server has them (vLLM, Ridgeline): the twenty likeliest tokens and the one of the text
are exact, and the rest of the probability is spread evenly over all others. Greedy continuations
are compared by the texts of their tokens, with the margin between the two best tokens from the
server's own logprobs.

A server that has just started is warmed up before anything counts. Its first requests pay for one-
time work (kernels compiled, buffers allocated, pages touched), and a first probe that missed the
SLO for that reason would end the search before it began. Small bursts are sent until one is no
longer much faster than the one before.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ridgeline.config.settings import Settings
from ridgeline.errors import DECODE_ERRORS, CannotRun
from ridgeline.hardware.open_files import make_room_for_load
from ridgeline.http_replies import error_text, open_reply
from ridgeline.measure.client.accepted_prompts import (
    ANY_FORM,
    COMMON_WORDS,
    NAMES,
    PATHS,
    AcceptedPrompts,
    PromptForm,
    Vocabulary,
)
from ridgeline.measure.client.http_connection import OK, HttpConnectionError
from ridgeline.measure.client.http_target import HttpTarget, authorization, connection_pool
from ridgeline.measure.client.load_client import LoadOptions, OnFinish, run_load
from ridgeline.measure.monitors.machine_load import LoadMeter
from ridgeline.measure.workload import Workload
from ridgeline.measure.workload.arrivals import Closed
from ridgeline.optimize.environment import Load
from ridgeline.optimize.quality.text_comparison import Array
from ridgeline.optimize.time_budget import time_left_s
from ridgeline.records import EngineInfo, RunTrace
from ridgeline.report.numbers import rounded

TokenNumbers = dict[str, int]

TOP_LOGPROBS = 20  # vLLM's default ceiling
CLOSE_NATS = 2.0  # rounding is measured where it could matter, not at leads of ten nats
SCORING_TIMEOUT_S = 120.0
LOGPROBS: dict[PromptForm, dict[str, object]] = {
    "tokens": {"logprobs": 2},
    "text": {"logprobs": 2},
    "chat": {"logprobs": True, "top_logprobs": 2},
}
HTTP_TOO_MANY, TOO_MANY = 429, "HTTP 429"
RATE_LIMITED_SHARE = 0.25  # of a run's requests; fewer are a full queue under overload
RATE_LIMIT_REPEATS, MAX_WAIT_S = 4, 20.0

_TWIN_LATE = re.compile(rb"^ridgeline_twin_late_seconds_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)

WARMUP_BURSTS, WARMUP_REQUESTS, WARMUP_USERS = 4, 8, 4
WARMUP_DONE_RATIO = 0.8  # a burst taking more than this share of the previous one ends the warm-up
WARMUP_SHARE = 0.1  # of the time that the search has left, at most, for one burst
WARMUP_SEED = 10**9  # far from the seeds of runs, so that no measured prompt is in the prefix cache


class ServerAddress(NamedTuple):
    """The address of a server that is up, and the number of its current start."""

    url: str
    start: int


class ModelAndKey(NamedTuple):
    """The name under which a server has the model, and the key to ask for it."""

    name: str
    api_key: str | None = None


class ServerPrompts(NamedTuple):
    """The workload as token ids, and as texts for a server that only chats.

    `vocabulary` is that of the model: it writes ids as text and counts the tokens of answers.
    """

    tokens: Workload
    texts: Workload
    vocabulary: Vocabulary = COMMON_WORDS


class WarmUpBursts:
    """What is known of a server's warm-ups: the longest burst, in seconds."""

    longest_s = 0.0


class ServerDeployment:
    """A `Deployment` over HTTP. `up` makes sure that the server is up and returns its address."""

    def __init__(
        self,
        up: Callable[[], ServerAddress],
        model: ModelAndKey,
        prompts: ServerPrompts,
        info: EngineInfo,
        names: TokenNumbers,
        vocab_size: int = 0,
        bursts: WarmUpBursts | None = None,
    ) -> None:
        self._up, self._model, self._prompts = up, model, prompts
        self._info, self._names, self._vocab_size = info, names, vocab_size
        self._warmed: int | None = None  # number of the start that was warmed up
        self._bursts = bursts or WarmUpBursts()
        self._accepted = AcceptedPrompts()
        self._answers = AnswerMargins()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def model(self) -> ModelAndKey:
        """The name under which the server has the model, and the key to ask for it."""
        return self._model

    @property
    def prompt_form(self) -> PromptForm:
        """What the server takes as a prompt; known once it was warmed up."""
        return self._accepted.form

    def address(self) -> str:
        """The server's address, once it is up. Blocks while it starts."""
        return self._up().url

    async def run(self, load: Load, on_finish: OnFinish | None = None) -> RunTrace:
        arrivals, options = load.poisson()
        url = await self._url()
        make_room_for_load()
        target, late_s = self._target(url), read_late_s(url)
        meter = LoadMeter()  # the server is a child of this process
        try:
            run = await run_load(target, self._workload, arrivals, options, on_finish=on_finish)
        finally:
            await target.close()
        check_rate_limit(run, load.rate)
        if any(request.error for request in run.requests):
            self._up()  # which says so if the server has crashed
        load_of_others = meter.read()
        if late_s is not None and load_of_others is not None:
            late_share = min(1.0, ((read_late_s(url) or 0.0) - late_s) / run.duration_s)
            load_of_others = msgspec.structs.replace(load_of_others, waited_share=late_share)
        return msgspec.structs.replace(run, machine_load=load_of_others)

    @property
    def _workload(self) -> Workload:
        return self._prompts.texts if self._accepted.form == "chat" else self._prompts.tokens

    def _target(self, url: str) -> HttpTarget:
        (name, api_key), vocabulary = self._model, self._prompts.vocabulary
        target = HttpTarget(
            url, name, endpoint="completions", api_key=api_key, vocabulary=vocabulary
        )
        target.accepted = self._accepted
        return target

    async def _url(self) -> str:
        """The address of the server, up and warmed up."""
        url, start = self._up()
        if start != self._warmed and await self._warm(url):
            self._warmed = start
        return url

    async def _warm(self, url: str) -> bool:
        """Send bursts until they get no faster; whether any request of them was answered."""
        target = self._target(url)
        before_s, is_answered = float("inf"), False
        try:
            self._accepted = await target.negotiate(ANY_FORM)
            for burst in range(WARMUP_BURSTS):
                options = _warm_up_options(WARMUP_SEED + burst, self._bursts.longest_s)
                run = await run_load(target, self._workload, Closed(WARMUP_USERS), options)
                is_answered |= any(request.finished_s is not None for request in run.requests)
                self._bursts.longest_s = max(self._bursts.longest_s, run.duration_s)
                if run.duration_s > WARMUP_DONE_RATIO * before_s:
                    break
                before_s = run.duration_s
        finally:
            await target.close()
        return is_answered

    async def greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[tuple[int, ...]]:
        """Greedy continuations as numbers of token texts: equal numbers are equal texts."""
        url = await self._url()
        return await asyncio.gather(
            *(self._complete(url, prompt, max_tokens) for prompt in prompts)
        )

    def margin(self, prompt: Sequence[int], output: Sequence[int], place: int) -> float:
        return self._answers.margin(prompt, output, place)

    def margin_variation(self) -> float:
        """Largest change, in nats, of a margin between two of its answers to one prompt."""
        return self._answers.variation

    def logprobs_of(self, tokens: Sequence[int]) -> Array:
        """[T, V] log-probabilities after each of T tokens, from `prompt_logprobs`.

        Blocks. Raises CannotRun if the server does not return them.
        """
        if self._accepted.form != "tokens":
            raise CannotRun(
                "this server takes no token ids, so it cannot score a text",
                value=NAMES[self._accepted.form],
            )
        # The last position is scored too if a token follows it, whichever it is.
        body = {
            "model": self._model.name,
            "prompt": [*tokens, tokens[-1]],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": TOP_LOGPROBS,
        }
        answer = post_blocking(self._up().url, "/v1/completions", body, self._model.api_key)
        rows = (answer.get("choices") or [{}])[0].get("prompt_logprobs")
        if not rows or len(rows) != len(tokens) + 1:
            raise CannotRun("this server returns no prompt_logprobs", value=self._info.model)
        return spread_logprobs(rows[1:], self._vocab_size)

    async def _complete(self, url: str, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        body, accepted = self._greedy_body(prompt, max_tokens), self._accepted
        path, logprobs = PATHS[accepted.form], LOGPROBS[accepted.form]
        try:
            answer = await post(url, path, body | logprobs, self._model.api_key)
        except CannotRun:  # many servers refuse logprobs
            answer = await post(url, path, body, self._model.api_key)
        texts, margins = read_logprobs(answer)
        output = tuple(self._names.setdefault(text, len(self._names)) for text in texts)
        self._answers.add(prompt, output, margins)
        return output

    def _greedy_body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        body: dict[str, object] = {
            "model": self._model.name,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        form, decode = self._accepted.form, self._prompts.vocabulary.decode
        if form == "chat":
            body["messages"] = [{"role": "user", "content": decode(prompt)}]
        else:
            body["prompt"] = list(prompt) if form == "tokens" else decode(prompt)
        return self._accepted.adapt(body)


def _warm_up_options(seed: int, longest_s: float) -> LoadOptions:
    """A burst of a few requests, which takes little of a search's budget on a slow server, but as
    long as an earlier one took: the end of a search has a reserve for that.
    """
    usual = LoadOptions(num_requests=WARMUP_REQUESTS, seed=seed)
    left_s = time_left_s()
    share_s = max(0.1, min(max(WARMUP_SHARE * left_s, longest_s), left_s) / 2)
    if share_s >= usual.grace_s:
        return usual
    return msgspec.structs.replace(usual, duration_s=share_s, grace_s=share_s)


def spread_logprobs(rows: Sequence[dict[str, Any]], vocab_size: int) -> Array:
    """[T, V] from rows of token id → {"logprob": …}; the remaining probability is spread evenly."""
    logprobs_TV = np.empty((len(rows), vocab_size), dtype=np.float32)
    for row_V, row in zip(logprobs_TV, rows, strict=True):
        ids = [int(token) for token in row]
        known = np.array([entry["logprob"] for entry in row.values()], dtype=np.float64)
        rest = max(1e-6, 1.0 - float(np.exp(known).sum()))
        row_V[:] = np.log(rest / max(1, vocab_size - len(ids)))
        row_V[ids] = known
    return logprobs_TV


def post_blocking(
    url: str, path: str, body: dict[str, Any], api_key: str | None = None
) -> dict[str, Any]:
    """One request from a thread that may block. Raises CannotRun with the server's message."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(
        f"{base_of(url)}{path}",
        data=msgspec.json.encode(body),
        headers={"content-type": "application/json", **authorization(api_key)},
    )
    try:
        with open_reply(request, SCORING_TIMEOUT_S) as reply:
            return msgspec.json.decode(reply.read(), type=dict[str, Any])
    except urllib.error.HTTPError as error:
        value, message = f"HTTP {error.code}", error_text(error)
        raise CannotRun(f"the server refused {path}", value=value, fix=message) from None
    except (OSError, *DECODE_ERRORS) as error:
        raise CannotRun(f"the server did not answer {path}: {error}", value=url) from None


def read_logprobs(answer: dict[str, Any]) -> tuple[list[str], list[float]]:
    """Token texts and margins (nats) of a completion, in OpenAI's completions or chat layout.

    Without logprobs in the response, characters stand for tokens and there are no margins.
    """
    choice = answer["choices"][0]
    logprobs = choice.get("logprobs") or {}
    if logprobs.get("content"):
        rows = logprobs["content"]
        tops = [[top["logprob"] for top in row.get("top_logprobs") or ()] for row in rows]
        return [row["token"] for row in rows], [_margin(top) for top in tops]
    if logprobs.get("tokens"):
        tops = [list((top or {}).values()) for top in logprobs.get("top_logprobs") or ()]
        return list(logprobs["tokens"]), [_margin(top) for top in tops]
    text = choice.get("text") or (choice.get("message") or {}).get("content") or ""
    return list(text), []


class AnswerMargins:
    """The margins of the tokens of a server's greedy answers, and by how much they vary.

    `variation`: the largest change, in nats, of the lead of a token over its rival between two
    answers to one prompt, where the texts before it are equal and the lead is at most `CLOSE_NATS`.
    Where the two tokens changed places, it is the sum of both margins.
    """

    def __init__(self) -> None:
        self.variation = 0.0
        self._margins: dict[tuple[int, ...], dict[tuple[int, ...], list[float]]] = {}

    def add(self, prompt: Sequence[int], output: tuple[int, ...], margins: list[float]) -> None:
        known = self._margins.setdefault(tuple(prompt), {})
        for other, other_margins in known.items():
            change = _largest_change(other, other_margins, output, margins)
            self.variation = max(self.variation, change)
        known[output] = margins

    def margin(self, prompt: Sequence[int], output: Sequence[int], place: int) -> float:
        """The margin of an answer's token, 0 if the server did not tell it."""
        margins = self._margins.get(tuple(prompt), {}).get(tuple(output), [])
        return margins[place] if place < len(margins) else 0.0


def _largest_change(
    old: Sequence[int], old_margins: list[float], new: Sequence[int], new_margins: list[float]
) -> float:
    largest = 0.0
    for before, after, lead, new_lead in zip(old, new, old_margins, new_margins, strict=False):
        change = abs(new_lead - lead) if before == after else lead + new_lead
        if min(lead, new_lead) <= CLOSE_NATS and math.isfinite(change):
            largest = max(largest, change)
        if before != after:
            break
    return largest


def _margin(logprobs: Sequence[float]) -> float:
    """Difference of the two best; infinite with fewer than two."""
    best = sorted(logprobs, reverse=True)[:2]
    return best[0] - best[1] if len(best) == 2 else float("inf")


def check_rate_limit(run: RunTrace, rate: float) -> None:
    """Refuse a run that a rate limit decided. Raises CannotRun."""
    limited = sum(TOO_MANY in (request.error or "") for request in run.requests)
    if limited > RATE_LIMITED_SHARE * len(run.requests):
        raise rate_limit_error(
            f"{limited} of {len(run.requests)} requests at {rounded(rate)} req/s"
        )


def rate_limit_error(value: str) -> CannotRun:
    """The error of a measurement that would measure a rate limit."""
    return CannotRun(
        "the server limits the rate of requests (HTTP 429), so what it can serve cannot be "
        "measured",
        value=value,
        fix="raise the limit of this key, or measure the server behind the gateway that sets it",
    )


async def post(
    url: str, path: str, body: dict[str, Any], api_key: str | None = None
) -> dict[str, Any]:
    """One request that is not streamed, repeated after the time that a rate limit asks for.

    Raises CannotRun with the server's own message.
    """
    for _ in range(RATE_LIMIT_REPEATS):
        try:
            return await _post_once(url, path, body, api_key)
        except _RateLimited as limit:
            await asyncio.sleep(limit.wait_s)
    raise rate_limit_error(path)


class _RateLimited(Exception):
    def __init__(self, wait_s: float) -> None:
        super().__init__(wait_s)
        self.wait_s = wait_s


async def _post_once(
    url: str, path: str, body: dict[str, Any], api_key: str | None
) -> dict[str, Any]:
    wire, prefix = connection_pool(url, api_key)
    parts: list[bytes] = []
    try:
        reply = await wire.post(prefix + path, msgspec.json.encode(body), parts.append)
        if reply.status == HTTP_TOO_MANY:
            wait = dict(reply.headers).get("retry-after", "1")
            raise _RateLimited(min(float(wait) if wait.isdigit() else 1.0, MAX_WAIT_S))
        if reply.status != OK:
            raise CannotRun(
                f"the server refused {path}",
                value=f"HTTP {reply.status}",
                fix=reply.body.decode("utf-8", "replace")[:300],
            )
        return msgspec.json.decode(b"".join(parts), type=dict[str, Any])
    except (HttpConnectionError, *DECODE_ERRORS) as error:
        raise CannotRun(f"the server did not answer {path}: {error}", value=url) from None
    finally:
        wire.close()


def read_late_s(url: str) -> float | None:
    """Seconds by which a twin's steps ended later than modelled; None for any other server.

    A twin waits instead of computing, so work of others only disturbs it where its steps are late.
    """
    try:
        with open_reply(f"{base_of(url)}/metrics", 5) as reply:
            found = _TWIN_LATE.search(reply.read())
    except (OSError, ValueError):
        return None
    return None if found is None else float(found[1])


def base_of(url: str) -> str:
    """The address of a server without a slash or /v1 at its end."""
    return url.rstrip("/").removesuffix("/v1")


def read_settings(url: str, reads: dict[str, str], api_key: str | None = None) -> dict[str, object]:
    """Settings reported by the running server, from rows "path of a JSON document#key"."""
    import urllib.request

    settings: dict[str, object] = {}
    for name, source in reads.items():
        path, _, key = source.partition("#")
        try:
            address = f"{url.rstrip('/')}{path}"
            request = urllib.request.Request(address, headers=authorization(api_key))
            with open_reply(request, 5) as reply:
                value = msgspec.json.decode(reply.read(), type=dict[str, Any]).get(key)
        except (OSError, *DECODE_ERRORS):
            continue
        if value is not None:
            settings[name] = value
    return settings


def check_settings_applied(
    settings: Settings, start: Settings, reported: dict[str, object]
) -> None:
    """Refuse a rung whose flag the server ignored, before it is measured.

    Raises CannotRun, naming the setting and what the server reports.
    """
    for name, value in reported.items():
        requested = getattr(settings, name, None)
        if requested != getattr(start, name, None) and requested != value:
            raise CannotRun(
                f"the server did not take the flag for {name}",
                value=f"{value} by its own word",
                limit=f"requested {requested}",
            )


def server_info(settings: Settings, reported: dict[str, object], model: str) -> EngineInfo:
    """What is known of a server from outside: its settings, as given or as it reports them."""
    return EngineInfo(
        model=model,
        settings={**msgspec.structs.asdict(settings), **reported},
        derivations=dict.fromkeys(reported, "reported by the server"),
        max_model_len=settings.max_model_len or 0,
        num_blocks=0,
        block_size=settings.block_size or 0,
        weight_bytes=0,
        kv_bytes_per_token=0,
        device="elsewhere",
        compute_dtype=settings.dtype,
    )
