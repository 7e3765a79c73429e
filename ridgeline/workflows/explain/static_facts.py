"""Facts about a configuration before anything is run, for the decision flowchart.

Times are bounds: max(FLOPs / peak, bytes / bandwidth) of a step, with the peaks that were measured
on this machine. What the engine adds to a step is not included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

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
    kv_layout,
    prefill_work,
    resident_weight_bytes,
    step_work,
)
from ridgeline.plan.simulate.answer_cache import QUESTION_TOKENS
from ridgeline.plan.step_time.memory import held_tokens
from ridgeline.records import Slo
from ridgeline.roofline import Peaks, bound
from ridgeline.workflows.configuration_costs import ConfigurationCosts, base_facts

MAX_SEQS = 4096
SAME_COST_RATIO = 1.1  # steps within 10 % count as equally expensive
MIN_DOUBLING_GAIN = 1.1  # in tokens per second, for a larger batch to pay
MAX_FREE_ROWS = 64


class PhaseBounds:
    """Least seconds of a configuration's steps."""

    def __init__(self, model: CostModel, peaks: Peaks) -> None:
        self.model, self.peaks = model, peaks

    def seconds(self, work: StepWork) -> float:
        return bound(work, self.peaks).seconds

    def decode(self, num_seqs: int, context: int) -> float:
        """One token of each of `num_seqs` sequences."""
        return self.seconds(decode_work(self.model, num_seqs, context))

    def prompt(self, num_tokens: int, cached: int = 0) -> float:
        """The `num_tokens` of a prompt after `cached` ones."""
        return self.seconds(prefill_work(self.model, num_tokens, computed=cached))

    def rows(self, num_seqs: int, rows: int, context: int) -> float:
        """`rows` tokens of each sequence, all through the LM head, as in a verified draft."""
        shapes = [(rows, context)] * num_seqs
        return self.seconds(step_work(self.model, shapes, num_seqs * rows))


def static_facts(
    machine: Machine,
    settings: Settings,
    sample: Sequence[LoadRequest],
    slo: Slo,
    request_rate: float | None = None,
    *,
    elsewhere: bool = False,
) -> dict[str, Value]:
    """All facts of `decisions.toml` for this workload. UserError if it cannot run at all.

    `elsewhere`: the machine is not this one.
    """
    costs = ConfigurationCosts(machine, elsewhere=elsewhere)
    resolved = costs.resolved(settings)
    facts = {**resolved_facts(resolved), **base_facts(machine, costs, settings, sample)}
    prompt, output = (
        max(1, round(float(cast(float, facts[name]))))
        for name in ("mean_prompt_tokens", "mean_output_tokens")
    )
    facts |= {"mean_prompt_tokens": prompt, "mean_output_tokens": output}
    facts |= {"slo_ttft_s": slo.ttft_s, "slo_tpot_s": slo.tpot_s}
    facts = {name: value for name, value in facts.items() if value is not None}
    bounds = PhaseBounds(cost_model(resolved.spec), costs.peaks(settings))
    policy = resolved.kv_eviction_config
    held = held_tokens(policy, prompt, prompt + output)
    facts |= _memory_facts(resolved, machine, costs.peaks(settings), held)
    running = max(1, min(resolved.max_num_seqs, int(str(facts["kv_seqs"]))))
    middle = held_tokens(policy, prompt, prompt + output // 2)
    facts |= _decode_facts(bounds, running, middle, slo)
    shared = float(str(facts["shared_prompt_share"]))
    facts |= _prompt_facts(bounds, resolved, prompt, shared, [(1, middle)] * running)
    facts |= _load_facts(facts, running, output, request_rate)
    return facts


def resolved_facts(resolved: ResolvedSettings) -> dict[str, Value]:
    """The resolved settings that are plain values."""
    kinds = (bool, int, float, str)
    return {k: v for k, v in resolved.values().items() if v is None or isinstance(v, kinds)}


def _memory_facts(
    resolved: ResolvedSettings, machine: Machine, peaks: Peaks, request_tokens: int
) -> dict[str, Value]:
    layout, size = kv_layout(resolved.spec), resolved.block_size
    per_request = layout.max_blocks(request_tokens, size, resolved.max_num_batched_tokens)
    return {
        "model_weights_bytes": resident_weight_bytes(resolved.spec),
        "kv_cache_bytes": resolved.num_blocks * layout.block_bytes(size),
        "kv_seqs": resolved.num_blocks // per_request,
        "bandwidth_bytes_s": peaks.bytes_s,
        "memory_bandwidth_bytes_s": machine.best_bandwidth_bytes_s,
    }


def _decode_facts(bounds: PhaseBounds, running: int, context: int, slo: Slo) -> dict[str, Value]:
    single, full = (decode_work(bounds.model, n, context) for n in (1, running))
    facts: dict[str, Value] = {
        "alone_token_s": bounds.seconds(single),
        "alone_bytes": single.bytes,
        "running_seqs": running,
        "full_step_s": bounds.seconds(full),
        "full_step_reads": bound(full, bounds.peaks).limit == "bandwidth",
        "full_weights_share": full.weight_bytes / full.bytes,
        "full_kv_share": 1 - full.weight_bytes / full.bytes,
        "free_rows_alone": _free_rows(bounds, 1, context),
        "free_rows_full": _free_rows(bounds, running, context),
    }
    limit = math.inf if slo.tpot_s is None else slo.tpot_s
    within = _largest(lambda n: bounds.decode(n, context) <= limit, MAX_SEQS)
    facts["seqs_that_pay"] = _largest_paying_batch(bounds, context, within)
    return facts if slo.tpot_s is None else {**facts, "seqs_within_tpot": within}


def _free_rows(bounds: PhaseBounds, num_seqs: int, context: int) -> int:
    """Rows per sequence that cost no more than one."""
    one = bounds.rows(num_seqs, 1, context)
    return _largest(
        lambda rows: bounds.rows(num_seqs, rows, context) <= SAME_COST_RATIO * one, MAX_FREE_ROWS
    )


def _largest_paying_batch(bounds: PhaseBounds, context: int, within: int) -> int:
    """The batch beyond which doubling gains too little, or misses the SLO."""
    batch = 1
    while 2 * batch <= within:
        gain = 2 * bounds.decode(batch, context) / bounds.decode(2 * batch, context)
        if gain < MIN_DOUBLING_GAIN:
            break
        batch *= 2
    return batch


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """The largest n <= limit for which a monotonic condition holds."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _prompt_facts(
    bounds: PhaseBounds,
    resolved: ResolvedSettings,
    prompt: int,
    shared: float,
    decoding: Sequence[tuple[int, int]],
) -> dict[str, Value]:
    """Prompts alone, and a step full of them by itself and with the `decoding` sequences in it."""
    cached = min(prompt - 1, int(shared * prompt))
    budget = resolved.max_num_batched_tokens
    if not resolved.enable_chunked_prefill:
        budget = max(budget, prompt)
    shapes = [(prompt, 0)] * (budget // prompt)
    if budget % prompt:
        shapes.append((budget % prompt, 0))
    mixed = [*shapes, *decoding]
    return {
        "prompt_s": bounds.prompt(prompt),
        "cached_prompt_s": bounds.prompt(prompt - cached, cached),
        "prompt_step_tokens": budget,
        "prompt_step_s": bounds.seconds(step_work(bounds.model, shapes, len(shapes))),
        "mixed_step_s": bounds.seconds(step_work(bounds.model, mixed, len(mixed))),
        "question_s": bounds.prompt(QUESTION_TOKENS),
    }


def _load_facts(
    facts: dict[str, Value], running: int, output: int, rate: float | None
) -> dict[str, Value]:
    """How many requests/s fit: each takes its prefill and its share of the decode steps."""
    name = "cached_prompt_s" if facts["enable_prefix_caching"] else "prompt_s"
    prompt_s, step_s = (float(str(facts[fact])) for fact in (name, "full_step_s"))
    carried = 1 / (prompt_s + output * step_s / running)
    if rate is None:
        return {"carried_req_s": carried}
    needed = math.ceil(rate / carried)
    return {"carried_req_s": carried, "request_rate_req_s": rate, "replicas_needed": needed}
