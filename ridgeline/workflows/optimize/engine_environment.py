"""The real laboratory of `ridgeline optimize`: engines in this process, the probe, the simulator.

Two engines may be up at once, but only one is loaded at a time. Prompts are tokenised before a
run, so that the load client, which shares the process with the engine, costs it as little as
possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import numpy as np

from ridgeline.config.settings import Settings
from ridgeline.diagnose.conditions import Value
from ridgeline.engine.build import make_scheduler
from ridgeline.engine.config import ResolvedSettings, resolve
from ridgeline.engine.engine import Engine
from ridgeline.engine.tokenization import Tokenizer, load_tokenizer
from ridgeline.errors import BadInput
from ridgeline.hardware.machine import Machine
from ridgeline.measure.client import OnFinish, run_load
from ridgeline.measure.inprocess import InProcessTarget
from ridgeline.measure.workload import Chat, LoadRequest, Workload, plain_chat
from ridgeline.modelspec.cost import (
    CostModel,
    cost_model,
    kv_bytes_per_token,
    num_params,
)
from ridgeline.optimize import quality
from ridgeline.optimize.environment import (
    Deployment,
    Environment,
    Load,
    MakeWeights,
    top_two_margin,
)
from ridgeline.optimize.quality import Array, Task
from ridgeline.records import EngineInfo, RunTrace, Sampling, Token
from ridgeline.roofline import Peaks, PriceStep
from ridgeline.workflows.optimize.calibrated_step_times import Prices, require_known
from ridgeline.workflows.optimize.simulator import Costs, SimulatedEngine

SAMPLE = 64  # requests that the workload's facts are taken from
NUM_CHECKS = 4
CHECK_PROMPT_TOKENS = 160
BLOCK = 16
NUM_MADE_WINDOWS = 64  # of random tokens


def build(
    settings: Settings, workload: Workload, machine: Machine, prices: Prices | None = None
) -> Environment:
    """Everything that the loop needs, for one model on this machine."""
    if prices is not None:
        require_known(prices, settings)
    tokenizer = load_tokenizer(settings.model)
    tokenised = Tokenised(workload, tokenizer)
    numbers = EngineNumbers(machine)
    sample = sample_of(tokenised, numbers.resolved(settings))
    spec, (_, size) = numbers.resolved(settings).spec, quality.load_quality_limits()
    return Environment(
        open=lambda chosen: _open(chosen, tokenised),
        simulator=SimulatedEngine(numbers.costs, numbers.scheduler, tokenised.requests, prices),
        price_of=numbers.price,
        peaks_of=numbers.peaks,
        facts=base_facts(machine, numbers, settings, sample),
        heldout=heldout_pieces(tokenizer, spec.vocab_size, size.window_tokens),
        tasks=tasks_for(tokenizer),
        make=_maker(tokenised, tokenizer),
        check_prompts=check_prompts_of(sample),
        longest_output=max(request.max_tokens for request in sample),
        vocab_size=spec.vocab_size,
    )


def _maker(workload: Tokenised, tokenizer: Tokenizer) -> MakeWeights:
    from ridgeline.workflows.optimize.quantized_candidates import maker  # which needs this file

    return maker(workload, tokenizer)


# ---- the workload ------------------------------------------------------------------------------


class Tokenised:
    """A workload whose prompts are token ids already. Samples are remembered by their seed."""

    def __init__(self, workload: Workload, tokenizer: Tokenizer) -> None:
        self._workload, self._tokenizer = workload, tokenizer
        self.requests = cache(self._requests)

    @property
    def name(self) -> str:
        return self._workload.name

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        return iter(self.requests(n, seed))

    def _requests(self, n: int, seed: int) -> tuple[LoadRequest, ...]:
        return tuple(
            msgspec.structs.replace(request, prompt=tuple(self._tokens(request)))
            for request in self._workload.sample(n, seed)
        )

    def _tokens(self, request: LoadRequest) -> Sequence[int]:
        if isinstance(request.prompt, tuple):
            return request.prompt
        if isinstance(request.prompt, str):
            return self._tokenizer.encode(request.prompt)
        return self._chat(request.prompt)

    def _chat(self, chat: Chat) -> Sequence[int]:
        """By the model's template; as plain text where it has none."""
        messages = [{"role": m.role, "content": m.content} for m in chat.messages]
        try:
            return self._tokenizer.apply_chat_template(messages)
        except BadInput:
            return self._tokenizer.encode(plain_chat(chat))


def sample_of(workload: Tokenised, resolved: ResolvedSettings) -> list[LoadRequest]:
    """The requests that the workload's facts come from; BadInput where one does not fit."""
    sample = list(workload.sample(SAMPLE, 0))
    _refuse_long_prompts(sample, resolved)
    return sample


def check_prompts_of(sample: Sequence[LoadRequest]) -> tuple[tuple[int, ...], ...]:
    """The ends of a few prompts, for the check of exactness."""
    return tuple(_prompt(request)[-CHECK_PROMPT_TOKENS:] for request in sample[:NUM_CHECKS])


def _prompt(request: LoadRequest) -> tuple[int, ...]:
    assert isinstance(request.prompt, tuple)
    return request.prompt


def _refuse_long_prompts(sample: Sequence[LoadRequest], resolved: ResolvedSettings) -> None:
    longest = max(len(_prompt(request)) + request.max_tokens for request in sample)
    if longest > resolved.max_model_len:
        raise BadInput(
            "a request of the workload does not fit the context",
            value=f"{longest} tokens",
            limit=f"--max-model-len {resolved.max_model_len}",
            fix="choose a workload with shorter prompts or a model with a longer context",
        )


def _load_facts(sample: Sequence[LoadRequest]) -> dict[str, Value]:
    """How long prompts are, and how much of them repeats the head of an earlier one."""
    return {
        "shared_prompt_share": shared_share(sample),
        "mean_prompt_tokens": sum(len(_prompt(request)) for request in sample) / len(sample),
        "mean_output_tokens": sum(request.max_tokens for request in sample) / len(sample),
    }


def shared_share(sample: Sequence[LoadRequest]) -> float:
    """The share of prompt tokens, in whole blocks, that repeat the head of an earlier prompt."""
    seen: set[tuple[int, ...]] = set()
    shared = total = 0
    for request in sample:
        tokens = _prompt(request)
        heads = [tokens[:end] for end in range(BLOCK, len(tokens), BLOCK)]
        shared += BLOCK * sum(head in seen for head in heads)
        total += len(tokens)
        seen.update(heads)
    return shared / total


KINDS = ("code", "prose", "code", "chat")
"""Of the held-out windows, in turn."""


def heldout_texts() -> dict[str, str]:
    """The held-out text by kind; code twice as long as the others."""
    folder = files("ridgeline") / "assets" / "heldout"
    names = {"code": "code.txt", "prose": "docs.txt"}
    found = {kind: (folder / name).read_text(encoding="utf-8") for kind, name in names.items()}
    lines = (folder / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [msgspec.json.decode(line)["messages"] for line in lines]
    told = ("\n\n".join(f"{m['role']}: {m['content']}" for m in chat) for chat in chats)
    return {**found, "chat": "\n\n".join(told)}


def heldout_pieces(
    tokenizer: Tokenizer, vocab_size: int, length: int, seed: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Windows of the held-out text, `KINDS` in turn; random ones where there is no tokenizer."""
    try:
        tokens = {kind: tokenizer.encode(text) for kind, text in heldout_texts().items()}
    except BadInput:
        rng = np.random.default_rng(seed)
        made = rng.integers(0, vocab_size, (NUM_MADE_WINDOWS, length))
        return tuple(tuple(window) for window in made.tolist())
    half = len(tokens["code"]) // 2
    turns = (tokens["code"][:half], tokens["prose"], tokens["code"][half:], tokens["chat"])
    return quality.cut_windows(turns, length, seed)


def tasks_for(tokenizer: Tokenizer) -> tuple[Task, ...]:
    """The questions of the quality panel; none for a model without a tokenizer."""
    try:
        return quality.make_tasks(tokenizer.encode)
    except BadInput:
        return ()


# ---- the arithmetic ----------------------------------------------------------------------------


class EngineNumbers:
    """What the spec and the probe say about a configuration; each is worked out once."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.resolved = cache(resolve)
        self._model = cache(self._cost_model)
        self.peaks = cache(self._peaks)

    def _cost_model(self, settings: Settings) -> CostModel:
        return cost_model(self.resolved(settings).spec)

    def scheduler(self, settings: Settings) -> Any:
        return make_scheduler(self.resolved(settings))

    def price(self, settings: Settings) -> PriceStep:
        return self._model(settings).step

    def costs(self, settings: Settings) -> Costs:
        return Costs(model=self._model(settings), peaks=self.peaks(settings))

    def _peaks(self, settings: Settings) -> Peaks:
        """What this machine can do for this configuration's working set and arithmetic."""
        resolved, machine = self.resolved(settings), self._machine
        nbytes = self._model(settings).fixed_weight_bytes + self._model(settings).head_weight_bytes
        rates = _rates(machine, resolved)
        kind = resolved.spec.layers[-1].mlp.gate.format.kind
        by_bytes = kind in ("int8", "int4") and "int8" in rates
        dtype = "int8" if by_bytes else resolved.dtype
        return Peaks(
            flops_s=rates[dtype],
            bytes_s=_bandwidth(machine, resolved, nbytes),
            dtype=dtype,
            source=f"measured on this machine, reading {nbytes / 1e6:.0f} MB over and over",
            flops_s_by_dtype=rates,
        )

    def model_facts(self, settings: Settings) -> dict[str, Value]:
        resolved = self.resolved(settings)
        return {
            "model_name": resolved.spec.name,
            "model_params": num_params(resolved.spec),
            "model_compute_dtype": resolved.dtype,
            "model_stored_dtype": resolved.spec.stored_dtype,
            "model_weights": resolved.spec.layers[-1].mlp.gate.format.kind,
            "model_kv_bytes_per_token": kv_bytes_per_token(resolved.spec),
        }


def _rates(machine: Machine, resolved: ResolvedSettings) -> dict[str, float]:
    """FLOP/s by dtype that this configuration's matrix products could reach."""
    if resolved.device.startswith("cuda") and machine.gpus:
        rates = dict(machine.gpus[0].gemm_flops)
    else:
        names = (resolved.dtype, "int8")
        found = {name: machine.peak_flops(name) for name in names}
        rates = {name: rate for name, rate in found.items() if rate is not None}
    if resolved.dtype not in rates:
        raise BadInput("the probe measured no rate for this dtype", value=resolved.dtype)
    return rates


def _bandwidth(machine: Machine, resolved: ResolvedSettings, nbytes: float) -> float:
    if resolved.device.startswith("cuda") and machine.gpus:
        return machine.gpus[0].read_bandwidth_bytes_s or machine.best_bandwidth_bytes_s
    return float(machine.bandwidth(nbytes))


def base_facts(
    machine: Machine, numbers: EngineNumbers, settings: Settings, sample: Sequence[LoadRequest]
) -> dict[str, Value]:
    """Of the machine, the model and the workload."""
    return {**_machine_facts(machine), **numbers.model_facts(settings), **_load_facts(sample)}


def _machine_facts(machine: Machine) -> dict[str, Value]:
    facts: dict[str, Value] = {
        "machine_cpu": machine.cpu_model,
        "machine_usable_cores": machine.usable_cores,
        "machine_memory_gb": round(machine.memory_bytes / 1e9, 1),
        "machine_memory_bandwidth_gb_s": round(machine.best_bandwidth_bytes_s / 1e9, 1),
        "machine_disturbed_while_probed": machine.disturbed,
    }
    for index, gpu in enumerate(machine.gpus):
        facts[f"machine_gpu_{index}"] = gpu.name
    return facts


# ---- engines -----------------------------------------------------------------------------------


@contextmanager
def _open(settings: Settings, workload: Tokenised) -> Iterator[Deployment]:
    with Engine.from_settings(settings) as engine:
        yield EngineDeployment(engine, workload)


class EngineDeployment:
    """A real engine as the loop sees it."""

    def __init__(self, engine: Engine, workload: Tokenised) -> None:
        self._engine, self._workload = engine, workload
        self._target = InProcessTarget(engine)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def run(self, load: Load, on_finish: OnFinish | None = None) -> RunTrace:
        arrivals, options = load.poisson()
        return await run_load(self._target, self._workload, arrivals, options, on_finish=on_finish)

    async def greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[tuple[int, ...]]:
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return await asyncio.gather(*(self._tokens(prompt, sampling) for prompt in prompts))

    def margin(self, prompt: Sequence[int], output: Sequence[int], place: int) -> float:
        return top_two_margin(self.logprobs_of((*prompt, *output[:place])))

    def logprobs_of(self, tokens: Sequence[int]) -> Array:
        return self._engine.logprobs_of(tokens)

    async def _tokens(self, prompt: Sequence[int], sampling: Sampling) -> tuple[int, ...]:
        events = self._engine.stream(prompt, sampling)
        return tuple([event.token async for event in events if isinstance(event, Token)])
