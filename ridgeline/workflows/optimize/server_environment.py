"""The environment of an optimisation of another server (vLLM, SGLang, llama.cpp), from outside.

The server's processes are started and stopped here, with flags by
`ridgeline/optimize/external/server_flags.toml`; the simulator learns step times inferred from what
the clients saw. The model is needed for its tokenizer and its arithmetic; its weights are not
loaded here.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.engine.tokenization import NoTokenizer, Tokenizer, load_tokenizer
from ridgeline.errors import DECODE_ERRORS, CannotRun
from ridgeline.hardware.machine import Machine
from ridgeline.http_replies import open_reply
from ridgeline.measure.client.accepted_prompts import COMMON_WORDS, Vocabulary
from ridgeline.measure.client.http_target import authorization, key_refused
from ridgeline.measure.workload import LoadRequest, Workload
from ridgeline.optimize.drivers.server_process import DEFAULT_PORT, NEEDS_KEY, ActiveServer
from ridgeline.optimize.environment import (
    ContextSource,
    Deployment,
    Environment,
    Load,
    LongContexts,
    NextSteps,
    ServedTexts,
    UserEvaluation,
)
from ridgeline.optimize.external.inferred_steps import infer_steps
from ridgeline.optimize.external.scoring import DeploymentScorer
from ridgeline.optimize.external.server_deployment import (
    ModelAndKey,
    ServerAddress,
    ServerDeployment,
    ServerPrompts,
    TokenNumbers,
    WarmUpBursts,
    check_settings_applied,
    read_settings,
    server_info,
)
from ridgeline.optimize.quality import load_quality_limits
from ridgeline.optimize.quality.served_text import TextSource
from ridgeline.optimize.quality.task_questions import text_questions
from ridgeline.records import RunTrace
from ridgeline.roofline import Peaks
from ridgeline.twin.config import STAND_IN
from ridgeline.workflows.configuration_costs import machine_facts
from ridgeline.workflows.evaluate.eval_command import run_evaluation
from ridgeline.workflows.evaluate.heldout_text import heldout_pieces, heldout_windows
from ridgeline.workflows.evaluate.long_contexts import (
    context_tokens,
    recall_texts,
    texts_to_continue,
)
from ridgeline.workflows.load.tokenized_workload import (
    NUM_PROFILED,
    TokenizedWorkload,
    check_prompts,
    prompt_of,
    sample_requests,
    shared_prompt_share,
    traffic_profile,
    workload_facts,
)
from ridgeline.workflows.optimize.restartable_server import ServerRecipe
from ridgeline.workflows.optimize.server_costs import ServerCosts
from ridgeline.workflows.optimize.simulator import SimulatedEngine
from ridgeline.workflows.optimize.split_simulation import Split

# Servers compute in bfloat16 and batch as requests arrive: two tokens closer than this may swap.
NEAR_TIE_NATS = 0.1
SCORING_SERVERS = ("vllm", "ridgeline")  # return prompt_logprobs
SCORED_KINDS = (*SCORING_SERVERS, "sglang", "tgi", "llama-server")  # by an interface of their own
TEXT_CHARS, MAX_TEXTS, MAX_QUESTIONS = 600, 512, 2048


def server_environment(
    settings: Settings,
    workload: Workload,
    machine: Machine | None,
    recipe: ServerRecipe,
    logs: Path,
) -> Environment:
    """Everything that the search needs for one model on one server.

    `machine` is this one, as probed; None where the server's device is known and is another.
    `logs`: folder for the output of the server's processes.
    """
    tokenizer = _tokenizer(settings.model, recipe)
    tokenized = TokenizedWorkload(workload, tokenizer)
    start = settings
    costs = ServerCosts(machine, recipe, start)
    sample = sample_requests(tokenized, costs.max_model_len)
    here = {} if machine is None else machine_facts(machine)
    has_gpu = machine is not None and bool(machine.gpus)
    facts = {**here, **costs.facts(), **workload_facts(sample)}
    vocab_size = costs.spec.vocab_size
    prompts = ServerPrompts(tokenized, workload, _vocabulary(tokenizer))
    starter = _ServerStarter(recipe, start, prompts, logs, vocab_size)
    simulated = SimulatedEngine(
        costs.bounds, costs.scheduler, tokenized.requests, flag_effect=costs.flag_effect
    )
    return Environment(
        open=starter.open,
        simulator=_ServerSimulator(simulated, costs),
        price_of=costs.price,
        peaks_of=lambda chosen: _peaks_seen_from_outside(
            costs.peaks(chosen), costs.devices_per_replica(chosen)
        ),
        facts={**facts, **recipe.facts, **recipe.device_facts(has_gpu=has_gpu)},
        heldout=_heldout(tokenizer, recipe),
        served=_served_texts(recipe),
        long_contexts=_long_contexts(tokenizer, recipe, sample, costs.max_model_len),
        evaluation=_user_evaluation(recipe),
        check_prompts=check_prompts(sample),
        traffic=traffic_profile(list(tokenized.sample(NUM_PROFILED, 0))),
        longest_output=max(request.max_tokens for request in sample),
        vocab_size=vocab_size,
        start_description="starting the server with its command line unchanged",
        steps_of=partial(infer_steps, shared_share=shared_prompt_share(sample)),
        near_tie=NEAR_TIE_NATS,
        next_steps=NextSteps(
            serve="sh serve.sh",
            optimize="the same `ridgeline optimize` again, with",
            bench=f"ridgeline bench --url {recipe.command.at(DEFAULT_PORT)} "
            "--workload {workload} --slo {slo}",
        ),
    )


def _tokenizer(model: str, recipe: ServerRecipe) -> Tokenizer:
    """The model's tokenizer; that of a twin if the model has none here."""
    tokenizer = load_tokenizer(model)
    if isinstance(tokenizer, NoTokenizer) and recipe.twin_device is not None:
        return load_tokenizer(STAND_IN)
    return tokenizer


def _vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """For servers that take no token ids, or do not count."""
    if isinstance(tokenizer, NoTokenizer):
        return COMMON_WORDS
    return Vocabulary(
        decode=tokenizer.decode,
        count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
    )


def _heldout(tokenizer: Tokenizer, recipe: ServerRecipe) -> tuple[tuple[int, ...], ...]:
    """Held-out text for lossy rungs, where the server scores prompts."""
    if isinstance(tokenizer, NoTokenizer) or recipe.flags.name not in SCORING_SERVERS:
        return ()
    return heldout_windows(tokenizer, load_quality_limits()[1].window_tokens)


def _served_texts(recipe: ServerRecipe) -> ServedTexts:
    """Held-out text for servers that do not score token ids, or have one address for both sides."""
    scores_tokens = recipe.driver.side_by_side and recipe.flags.name in SCORING_SERVERS
    kind = recipe.flags.name if recipe.flags.name in SCORED_KINDS else "openai"

    def source_of(deployment: Deployment) -> TextSource | None:
        assert isinstance(deployment, ServerDeployment)
        form = deployment.prompt_form
        if scores_tokens and form == "tokens":
            return None
        return DeploymentScorer(deployment, "chat" if form == "chat" else kind)

    return ServedTexts(
        texts=heldout_pieces(TEXT_CHARS, MAX_TEXTS),
        questions=tuple(text_questions(MAX_QUESTIONS)),
        source_of=source_of,
    )


def _long_contexts(
    tokenizer: Tokenizer, recipe: ServerRecipe, sample: Sequence[LoadRequest], max_model_len: int
) -> LongContexts:
    """Contexts as long as the workload's, asked over HTTP."""
    kind = recipe.flags.name if recipe.flags.name in SCORED_KINDS else "openai"
    longest = context_tokens(max(len(prompt_of(request)) for request in sample), max_model_len)
    counted_by = None if isinstance(tokenizer, NoTokenizer) else tokenizer

    def source_of(deployment: Deployment) -> ContextSource:
        assert isinstance(deployment, ServerDeployment)
        return DeploymentScorer(deployment, "chat" if deployment.prompt_form == "chat" else kind)

    return LongContexts(
        texts=texts_to_continue(counted_by, longest),
        recall=recall_texts(counted_by, longest),
        source_of=source_of,
    )


def _user_evaluation(recipe: ServerRecipe) -> UserEvaluation | None:
    """The command of --eval-cmd, run against a deployment."""
    command = recipe.eval_cmd
    if command is None:
        return None

    async def run(deployment: Deployment) -> float | None:
        assert isinstance(deployment, ServerDeployment)
        return await run_evaluation(command, deployment.address(), deployment.model.name)

    return UserEvaluation(run=run, margin=recipe.eval_margin)


def _peaks_seen_from_outside(peaks: Peaks, num_devices: int) -> Peaks:
    """The peaks of all devices of a replica, with a note on what the points under them are."""
    note = (
        "steps as clients saw them, host and network included; weights as MODEL's files store them"
    )
    devices = "" if num_devices == 1 else f"{num_devices} devices, each "
    return peaks.scaled(num_devices, f"{devices}{peaks.source}; {note}")


class _ServerSimulator:
    """The simulator, which refuses settings that this server has no flag for.

    Replicas share the requests, so one of them is simulated with its part. Servers with prefill and
    decode apart are simulated together.
    """

    def __init__(self, simulated: SimulatedEngine, costs: ServerCosts) -> None:
        self._simulated, self._costs = simulated, costs
        self.learn = simulated.learn

    def run(self, settings: Settings, load: Load) -> RunTrace:
        costs = self._costs
        load = msgspec.structs.replace(load, rate=load.rate / costs.replicas(settings))
        layout = costs.split(settings)
        if layout is None:
            return self._simulated.run(settings, load)
        split = Split(layout=layout, transfer_s=costs.transfer_s)
        return self._simulated.run_split(settings, load, split)


class _ServerStarter:
    """Starts the server with the flags of a configuration: at most two at a time."""

    def __init__(
        self,
        recipe: ServerRecipe,
        start: Settings,
        prompts: ServerPrompts,
        logs: Path,
        vocab_size: int,
    ) -> None:
        self._recipe, self._start, self._prompts, self._logs = recipe, start, prompts, logs
        self._vocab_size = vocab_size
        self._active = ActiveServer(recipe.driver.side_by_side)
        self._token_numbers: TokenNumbers = {}
        self._bursts = WarmUpBursts()
        self._numbers = count(1)

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Deployment]:
        recipe = self._recipe
        flags = recipe.flags.words(settings, self._start)
        log = self._logs / f"server-{next(self._numbers)}.log"
        process = recipe.driver.configure(flags, log)

        def activate() -> ServerAddress:
            self._active.activate(process)
            return ServerAddress(process.url, process.num_starts)

        try:
            url = activate().url
            model = recipe.served_model_name or _first_model(url, recipe.api_key)
            reported = read_settings(url, recipe.flags.reads, recipe.api_key)
            check_settings_applied(settings, self._start, reported)
            info = server_info(settings, reported, model)
            yield ServerDeployment(
                activate,
                ModelAndKey(model, recipe.api_key),
                self._prompts,
                info,
                self._token_numbers,
                self._vocab_size,
                self._bursts,
            )
        finally:
            self._active.retire(process)


def _first_model(url: str, api_key: str | None) -> str:
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/models", headers=authorization(api_key))
    try:
        with open_reply(request, 10) as reply:
            return str(json.load(reply)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        if error.code in NEEDS_KEY:
            raise key_refused(url, error.code, api_key) from None
        raise CannotRun("the server lists no models", value=url, fix=str(error)) from None
    except (OSError, LookupError, TypeError, *DECODE_ERRORS) as error:
        raise CannotRun(
            "the server's list of models cannot be read", value=request.full_url, fix=str(error)
        ) from None
