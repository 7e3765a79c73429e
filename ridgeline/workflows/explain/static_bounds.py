"""What is known of a configuration before anything is run: the facts of the decision flowchart.

Everything here is a bound: max(FLOPs / peak, bytes / bandwidth) of a step, with the ceilings that
were measured on this machine. Nothing that the engine adds to a step is in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ridgeline.config.settings import Settings
from ridgeline.diagnose.conditions import Value
from ridgeline.engine.config import ResolvedSettings
from ridgeline.hardware.machine import Machine
from ridgeline.measure.workload import LoadRequest
from ridgeline.modelspec.cost import (
    CostModel,
    StepWork,
    cost_model,
    decode_work,
    kv_bytes_per_token,
    prefill_work,
    resident_weight_bytes,
    step_work,
)
from ridgeline.records import Slo
from ridgeline.roofline import Peaks, bound
from ridgeline.workflows.configuration_costs import ConfigurationCosts, base_facts

MOST_SEQS = 4096
NEARLY = 1.1  # a step this much longer is called as cheap
PAYS = 1.1  # what a doubling of the batch must bring in tokens per second


class StepBounds:
    """The least seconds of steps of one configuration."""

    def __init__(self, model: CostModel, peaks: Peaks) -> None:
        self.model, self.peaks = model, peaks

    def seconds(self, work: StepWork) -> float:
        return bound(work, self.peaks).seconds

    def decode(self, num_seqs: int, context: int) -> float:
        """One token of each of `num_seqs` sequences."""
        return self.seconds(decode_work(self.model, num_seqs, context))

    def prompt(self, num_tokens: int, cached: int = 0) -> float:
        """The `num_tokens` of a prompt behind `cached` ones."""
        return self.seconds(prefill_work(self.model, num_tokens, computed=cached))

    def rows(self, num_seqs: int, rows: int, context: int) -> float:
        """`rows` tokens of each sequence, all of them through the LM head: a verified draft."""
        shapes = [(rows, context)] * num_seqs
        return self.seconds(step_work(self.model, shapes, num_seqs * rows))


def facts_before(
    machine: Machine,
    settings: Settings,
    sample: Sequence[LoadRequest],
    slo: Slo,
    request_rate: float | None = None,
) -> dict[str, Value]:
    """All facts of `decisions.toml` for this workload. UserError where it cannot run at all."""
    numbers = ConfigurationCosts(machine)
    resolved = numbers.resolved(settings)
    facts = {**resolved_facts(resolved), **base_facts(machine, numbers, settings, sample)}
    prompt, output = (
        max(1, round(float(facts[name])))  # type: ignore[arg-type]  # both are numbers
        for name in ("mean_prompt_tokens", "mean_output_tokens")
    )
    facts |= {"mean_prompt_tokens": prompt, "mean_output_tokens": output}
    facts |= {"slo_ttft_s": slo.ttft_s, "slo_tpot_s": slo.tpot_s}
    facts = {name: value for name, value in facts.items() if value is not None}
    bounds = StepBounds(cost_model(resolved.spec), numbers.peaks(settings))
    facts |= _memory_facts(resolved, machine, numbers.peaks(settings), prompt + output)
    running = max(1, min(resolved.max_num_seqs, int(str(facts["kv_seqs"]))))
    facts |= _decode_facts(bounds, running, prompt + output // 2, slo)
    facts |= _prompt_facts(bounds, resolved, prompt, float(str(facts["shared_prompt_share"])))
    facts |= _load_facts(facts, running, output, request_rate)
    return facts


def resolved_facts(resolved: ResolvedSettings) -> dict[str, Value]:
    """The settings as they would be used, those that are plain values."""
    kinds = (bool, int, float, str)
    return {k: v for k, v in resolved.values().items() if v is None or isinstance(v, kinds)}


def _memory_facts(
    resolved: ResolvedSettings, machine: Machine, peaks: Peaks, request_tokens: int
) -> dict[str, Value]:
    tokens = resolved.num_blocks * resolved.block_size
    return {
        "model_weights_bytes": resident_weight_bytes(resolved.spec),
        "kv_cache_bytes": tokens * kv_bytes_per_token(resolved.spec),
        "kv_seqs": tokens // request_tokens,
        "bandwidth_bytes_s": peaks.bytes_s,
        "memory_bandwidth_bytes_s": machine.best_bandwidth_bytes_s,
    }


def _decode_facts(bounds: StepBounds, running: int, context: int, slo: Slo) -> dict[str, Value]:
    alone, full = (decode_work(bounds.model, n, context) for n in (1, running))
    facts: dict[str, Value] = {
        "alone_token_s": bounds.seconds(alone),
        "alone_bytes": alone.bytes,
        "running_seqs": running,
        "full_step_s": bounds.seconds(full),
        "full_step_reads": bound(full, bounds.peaks).limit == "bandwidth",
        "full_weights_share": full.weight_bytes / full.bytes,
        "full_kv_share": 1 - full.weight_bytes / full.bytes,
        "free_rows_alone": _free_rows(bounds, 1, context),
        "free_rows_full": _free_rows(bounds, running, context),
    }
    limit = math.inf if slo.tpot_s is None else slo.tpot_s
    within = _most(lambda n: bounds.decode(n, context) <= limit, MOST_SEQS)
    facts["seqs_that_pay"] = _that_pay(bounds, context, within)
    return facts if slo.tpot_s is None else {**facts, "seqs_within_tpot": within}


def _free_rows(bounds: StepBounds, num_seqs: int, context: int) -> int:
    one = bounds.rows(num_seqs, 1, context)
    return _most(lambda rows: bounds.rows(num_seqs, rows, context) <= NEARLY * one, 64)


def _that_pay(bounds: StepBounds, context: int, within: int) -> int:
    """The batch after which a doubling brings less than PAYS, or no longer keeps the promise."""
    batch = 1
    while 2 * batch <= within:
        more = 2 * bounds.decode(batch, context) / bounds.decode(2 * batch, context)
        if more < PAYS:
            break
        batch *= 2
    return batch


def _most(holds: Callable[[int], bool], limit: int) -> int:
    """The largest n <= limit for which it holds, where it holds up to there and never after."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _prompt_facts(
    bounds: StepBounds, resolved: ResolvedSettings, prompt: int, shared: float
) -> dict[str, Value]:
    cached = min(prompt - 1, int(shared * prompt))
    most = resolved.max_num_batched_tokens
    if not resolved.enable_chunked_prefill:
        most = max(most, prompt)
    shapes = [(prompt, 0)] * (most // prompt) + ([(most % prompt, 0)] if most % prompt else [])
    return {
        "prompt_s": bounds.prompt(prompt),
        "cached_prompt_s": bounds.prompt(prompt - cached, cached),
        "prompt_step_tokens": most,
        "prompt_step_s": bounds.seconds(step_work(bounds.model, shapes, len(shapes))),
    }


def _load_facts(
    facts: dict[str, Value], running: int, output: int, rate: float | None
) -> dict[str, Value]:
    """A request takes its prompt's time, and its share of the steps that decode it."""
    name = "cached_prompt_s" if facts["enable_prefix_caching"] else "prompt_s"
    prompt_s, step_s = (float(str(facts[each])) for each in (name, "full_step_s"))
    carried = 1 / (prompt_s + output * step_s / running)
    if rate is None:
        return {"carried_req_s": carried}
    needed = math.ceil(rate / carried)
    return {"carried_req_s": carried, "request_rate_req_s": rate, "replicas_needed": needed}
