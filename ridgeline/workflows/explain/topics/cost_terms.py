"""What a technique of the field could gain here: bounds of the term that it makes smaller.

Amdahl's law on the roofline's bounds: a technique that leaves `keeps` of a part of a step shortens
the step by what that part is of it, and by nothing where the step is bound by something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from ridgeline.diagnose.conditions import Value, seconds
from ridgeline.report.numbers import rounded

Facts = Mapping[str, Value]
NEGLIGIBLE = 1.02  # a gain that is not worth having
MANY_ROWS = 4  # of a sequence at no cost, for drafts to have room


class CostTerm(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the cost of serving.

    `judge` says, from the facts of the configuration and the share of the term that is left (None:
    unknown), what the term is here and what a technique could gain from it.
    """

    title: str
    judge: Callable[[Facts, float | None], str]


def _number(facts: Facts, name: str) -> float:
    return float(str(facts[name]))


def _speedup(share: float, keeps: float) -> float:
    """Amdahl's law."""
    return 1 / (1 - share * (1 - keeps))


def _gain(share: float, keeps: float) -> str:
    gain = _speedup(share, keeps)
    if gain < NEGLIGIBLE:
        return "next to nothing to gain here"
    return f"with {keeps:.0%} of them left at most {rounded(gain)} times as fast"


def _bytes_of_a_step(name: str, share_name: str) -> Callable[[Facts, float | None], str]:
    def judge(facts: Facts, keeps: float | None) -> str:
        share, num_seqs = _number(facts, share_name), int(_number(facts, "running_seqs"))
        text = (
            f"a decode step of {num_seqs} sequences takes at least "
            f"{seconds(_number(facts, 'full_step_s'))}; {name} are {share:.0%} of its bytes"
        )
        if not facts["full_step_reads"]:
            return f"{text}, but arithmetic bounds it: fewer bytes do not shorten it"
        return f"{text}: {_gain(share, keeps)}" if keeps is not None else text

    return judge


def _capacity(facts: Facts, keeps: float | None) -> str:
    held, paying = (int(_number(facts, name)) for name in ("kv_seqs", "seqs_that_pay"))
    text = f"the KV cache holds {held:,} requests of this load, and {paying:,} at once would pay"
    return f"{text}: {'memory limits the batch' if held < paying else 'memory is no limit'}"


def _prompt(facts: Facts, keeps: float | None) -> str:
    whole, share = _number(facts, "prompt_s"), _prompt_share(facts)
    text = (
        f"a prompt of {_number(facts, 'mean_prompt_tokens'):,.0f} tokens takes at least "
        f"{seconds(whole)} to compute, {share:.0%} of what a request costs the machine"
    )
    if keeps is None:
        return text
    gain = _speedup(share, keeps)
    return f"{text}: with {keeps:.0%} of that left at most {rounded(gain)} times the requests"


def _prompt_share(facts: Facts) -> float:
    """Of a request's share of all steps, if every slot is occupied."""
    prompt_s, step_s, running, output = (
        _number(facts, name)
        for name in ("prompt_s", "full_step_s", "running_seqs", "mean_output_tokens")
    )
    return prompt_s / (prompt_s + output * step_s / running)


def _shared_prompt(facts: Facts, keeps: float | None) -> str:
    shared, whole, rest = (
        _number(facts, name) for name in ("shared_prompt_share", "prompt_s", "cached_prompt_s")
    )
    if shared < 0.01:
        return "prompts of this load share nothing: name yours with --workload"
    return (
        f"{shared:.0%} of the prompt tokens are shared: a prompt takes at least {seconds(whole)} "
        f"to compute, and {seconds(rest)} where the shared part is cached"
    )


def _drafts(facts: Facts, keeps: float | None) -> str:
    alone, full = (int(_number(facts, name)) for name in ("free_rows_alone", "free_rows_full"))
    num_seqs = int(_number(facts, "running_seqs"))
    verdict = "room for drafts at any batch" if full >= MANY_ROWS else "no room in full steps"
    if alone < MANY_ROWS:
        verdict = "no room for drafts on this machine"
    return (
        f"up to {alone} tokens of one sequence cost a step no more than one, and up to {full} of "
        f"each of {num_seqs} sequences: {verdict}"
    )


def _stalls(facts: Facts, keeps: float | None) -> str:
    step_s, mixed_s = (_number(facts, name) for name in ("full_step_s", "mixed_step_s"))
    limit = facts.get("slo_tpot_s")
    text = (
        f"a step of decoding takes at least {seconds(step_s)}, and one with "
        f"{_number(facts, 'prompt_step_tokens'):,.0f} tokens of prompts in it {seconds(mixed_s)}"
    )
    if limit is None:
        return text
    verb = "exceeds" if mixed_s > float(str(limit)) else "keeps"
    return f"{text}, which {verb} the TPOT limit of {seconds(float(str(limit)))}"


def _experts(facts: Facts, keeps: float | None) -> str:
    experts = int(_number(facts, "model_experts"))
    if experts == 0:
        return "this model has no routed experts: nothing to gain"
    return (
        f"this model has {experts} experts in a layer; weights are "
        f"{_number(facts, 'full_weights_share'):.0%} of the bytes of a full step"
    )


def _overhead(facts: Facts, keeps: float | None) -> str:
    return (
        f"the roofline bounds a step by {seconds(_number(facts, 'full_step_s'))}; what launches "
        "and the host add is measured, not computed: `ridgeline bench` and `diagnose` show it"
    )


def _devices(facts: Facts, keeps: float | None) -> str:
    text = (
        f"weights take {_number(facts, 'model_weights_bytes') / 1e9:,.1f} GB, and one device "
        f"carries {rounded(_number(facts, 'carried_req_s'))} requests/s of this load by the bound"
    )
    needed = facts.get("replicas_needed")
    return text if needed is None else f"{text}: {needed} of them for the rate that was given"


def _batch(facts: Facts, keeps: float | None) -> str:
    num_seqs, alone, full = (
        _number(facts, name) for name in ("running_seqs", "alone_token_s", "full_step_s")
    )
    return (
        f"a token takes at least {seconds(alone)} alone, and {seconds(full / num_seqs)} in a step "
        f"of {num_seqs:,.0f} sequences: up to {rounded(alone * num_seqs / full)} times the tokens"
    )


def _answers(facts: Facts, keeps: float | None) -> str:
    cost_s = 1 / _number(facts, "carried_req_s")
    return (
        f"a request of this load costs the machine at least {seconds(cost_s)}: what is not "
        "computed saves all of it"
    )


def _start(facts: Facts, keeps: float | None) -> str:
    nbytes = _number(facts, "model_weights_bytes")
    return (
        f"weights take {nbytes / 1e9:,.2f} GB, which a start copies in at least "
        f"{seconds(2 * nbytes / _number(facts, 'memory_bandwidth_bytes_s'))} from the page cache; "
        "converting them comes on top"
    )


TERMS: Mapping[str, CostTerm] = MappingProxyType(
    {
        "weights": CostTerm(
            title="bytes of weights per step",
            judge=_bytes_of_a_step("weights", "full_weights_share"),
        ),
        "kv": CostTerm(
            title="bytes of KV that attention reads per step",
            judge=_bytes_of_a_step("keys and values", "full_kv_share"),
        ),
        "capacity": CostTerm(title="memory, and so how many requests run at once", judge=_capacity),
        "prompt": CostTerm(title="computing prompts (TTFT)", judge=_prompt),
        "shared-prompt": CostTerm(
            title="computing again what prompts share (TTFT)", judge=_shared_prompt
        ),
        "drafts": CostTerm(
            title="steps per token, by computing several tokens in one (TPOT)", judge=_drafts
        ),
        "stalls": CostTerm(
            title="waiting of one request for the work of others (TPOT, TTFT)", judge=_stalls
        ),
        "experts": CostTerm(title="reading and moving experts", judge=_experts),
        "overhead": CostTerm(
            title="time around the arithmetic: host, launches, kernels", judge=_overhead
        ),
        "devices": CostTerm(title="what one device can hold and carry", judge=_devices),
        "batch": CostTerm(title="bytes of weights per token, by sharing a step", judge=_batch),
        "start": CostTerm(title="time from the start of a server to its first step", judge=_start),
        "answers": CostTerm(title="requests and tokens that need not be computed", judge=_answers),
    }
)
"""By name, as in `moves` of methods.toml and techniques.toml."""
