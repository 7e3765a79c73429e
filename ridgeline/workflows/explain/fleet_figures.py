"""What caches, tiers, the background lane, replicas and disaggregation would do for this model and
machine, by arithmetic.

Times are roofline bounds with the probed peaks, of the workload's mean request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ridgeline.diagnose.conditions import Value, seconds
from ridgeline.plan.simulate.answer_cache import ENTRY_BYTES, QUESTION_TOKENS, TOKEN_BYTES, hit_s
from ridgeline.report.numbers import rounded

Lines = tuple[tuple[str, str], ...]

FREE_BELOW = 0.9  # of the slots and of the time, for work in the background to have room
LINK_BYTES_S = 10e9 / 8
"""A network of 10 Gbit/s, for the example of servers on different machines."""


def fleet_figures(technique: str, facts: Mapping[str, Value]) -> Lines:
    """Labelled lines for one of FLEET_TECHNIQUES."""
    return _FIGURES[technique](facts)


def _number(facts: Mapping[str, Value], name: str) -> float:
    return float(str(facts[name]))


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _tiers(facts: Mapping[str, Value]) -> Lines:
    """Loading a prompt's blocks against computing them."""
    prompt, compute_s = (_number(facts, name) for name in ("mean_prompt_tokens", "prompt_s"))
    per_token = _number(facts, "model_kv_bytes_per_token")
    held = _number(facts, "kv_cache_bytes") / per_token
    moved = prompt * per_token
    copy_s = 2 * moved / _number(facts, "memory_bandwidth_bytes_s")  # read and written
    ratio = compute_s / copy_s
    verdict = "yes" if ratio > 1 and _number(facts, "shared_prompt_share") > 0 else "no"
    return (
        (
            "here",
            f"a prompt of {prompt:,.0f} tokens takes at least {seconds(compute_s)} to compute and "
            f"{seconds(copy_s)} to copy from memory ({_mib(moved)}): {rounded(ratio)} times",
        ),
        (
            "a tier pays",
            f"above {moved / compute_s / 1e6:,.0f} MB/s, for prefixes that return after the KV "
            f"cache, which holds {held:,.0f} tokens, has evicted them",
        ),
        (
            verdict,
            "is loading from memory faster than computing, and does this load share prompts?",
        ),
    )


def _disaggregation(facts: Mapping[str, Value]) -> Lines:
    """What a prompt's step adds to the time between tokens, against moving its blocks."""
    step_s, mixed_s = (_number(facts, name) for name in ("full_step_s", "mixed_step_s"))
    prompt = _number(facts, "mean_prompt_tokens")
    moved = prompt * _number(facts, "model_kv_bytes_per_token")
    shared_s = 2 * moved / _number(facts, "memory_bandwidth_bytes_s")
    compute_s = _number(facts, "prompt_s")
    slo = facts.get("slo_tpot_s")
    misses = slo is not None and step_s <= float(str(slo)) < mixed_s
    return (
        (
            "here",
            f"a step of {_number(facts, 'running_seqs'):.0f} sequences takes at least "
            f"{seconds(step_s)}, and {seconds(mixed_s)} with "
            f"{_number(facts, 'prompt_step_tokens'):,.0f} prompt tokens in it",
        ),
        (
            "moving",
            f"the {_mib(moved)} of a prompt take {seconds(shared_s)} in shared memory and "
            f"{seconds(moved / LINK_BYTES_S)} over 10 Gbit/s; computing them {seconds(compute_s)}",
        ),
        (
            "yes" if misses else "no",
            "do prompts in the step break the TPOT SLO that a step without them keeps? "
            + (
                "Fewer tokens per step (--max-num-batched-tokens) cost no second server: try them "
                "first."
                if misses
                else "Dividing servers gains nothing then."
            ),
        ),
    )


def _replicas(facts: Mapping[str, Value]) -> Lines:
    """Servers that fit in memory, what each carries, and how many the rate needs."""
    own = _number(facts, "model_weights_bytes") + _number(facts, "kv_cache_bytes")
    memory = _number(facts, "machine_memory_gb") * 1e9
    carried = _number(facts, "carried_req_s")
    lines = (
        (
            "here",
            f"one server carries at most {rounded(carried)} requests/s and holds {_mib(own)}; "
            f"{memory // own:.0f} fit in this machine's memory, but share its cores and bandwidth",
        ),
    )
    needed = facts.get("replicas_needed")
    if needed is None:
        return (*lines, ("how many", "give the load: --request-rate R"))
    rate = _number(facts, "request_rate_req_s")
    verdict = "yes" if int(str(needed)) > 1 else "no"
    return (
        *lines,
        (verdict, f"does {rate:g} requests/s need several? At least {needed}, by these bounds."),
    )


def _response_cache(facts: Mapping[str, Value]) -> Lines:
    """A stored answer against a computed one, and the memory it takes."""
    output = _number(facts, "mean_output_tokens")
    computed_s = _number(facts, "prompt_s") + output * _number(facts, "alone_token_s")
    stored_s, num_bytes = hit_s(round(output)), ENTRY_BYTES + TOKEN_BYTES * output
    gained = computed_s / stored_s
    return (
        (
            "here",
            f"the mean request takes at least {seconds(computed_s)} alone; its stored answer about "
            f"{seconds(stored_s)} of the server's time and no step ({rounded(gained)} times), and "
            f"{rounded(num_bytes / 1024)} KiB of memory",
        ),
        (
            "yes" if gained > 1 else "no",
            "is an answer quicker to send again than to compute? What repeats decides: "
            "`plan` and `simulate --response-cache-share`.",
        ),
    )


def _semantic_cache(facts: Mapping[str, Value]) -> Lines:
    """The embeddings of all questions against what the hits save: both in time of the machine.

    A request that shares its steps costs the machine less than it takes.
    """
    embedded_s, request_s = _number(facts, "question_s"), 1 / _number(facts, "carried_req_s")
    needed = embedded_s / request_s
    return (
        (
            "here",
            f"embedding a question of {QUESTION_TOKENS} tokens takes at least "
            f"{seconds(embedded_s)} of the machine's time; a hit saves the {seconds(request_s)} "
            "that a request of a full machine takes of it",
        ),
        (
            "no" if needed >= 1 else "yes",
            f"can hits pay for the embeddings? From {min(1.0, needed):.1%} of the requests on; how "
            "many are similar enough, `serve` does not know: its header counts them.",
        ),
    )


def _pins(facts: Mapping[str, Value]) -> Lines:
    """What a pinned prefix saves each request, and takes from the cache."""
    share, prompt = (_number(facts, name) for name in ("shared_prompt_share", "mean_prompt_tokens"))
    saved_s = _number(facts, "prompt_s") - _number(facts, "cached_prompt_s")
    held = share * prompt * _number(facts, "model_kv_bytes_per_token")
    part = held / _number(facts, "kv_cache_bytes")
    return (
        (
            "here",
            f"{share:.0%} of the prompt tokens repeat: found in the cache, they save at least "
            f"{seconds(saved_s)} of a prompt's {seconds(_number(facts, 'prompt_s'))}; pinned, a "
            f"prefix of {share * prompt:,.0f} tokens takes {part:.2%} of the cache",
        ),
        (
            "yes" if share > 0 and part < _number(facts, "prefix_pin_share") / 2 else "no",
            "does this load share prefixes, and may one account pin one of them?",
        ),
    )


def _background(facts: Mapping[str, Value]) -> Lines:
    """Slots that the load leaves, and what a step takes longer where they are filled."""
    slots = _number(facts, "max_num_seqs")
    alone_s, full_s = (_number(facts, name) for name in ("alone_token_s", "full_step_s"))
    running = _number(facts, "running_seqs")
    lines = (
        (
            "here",
            f"a step of one sequence takes at least {seconds(alone_s)}, of {running:.0f} "
            f"{seconds(full_s)}: {rounded(running * alone_s / full_s)} times the tokens per second",
        ),
    )
    if facts.get("request_rate_req_s") is None:
        return (*lines, ("how many", "give the load: --request-rate R"))
    output, rate = _number(facts, "mean_output_tokens"), _number(facts, "request_rate_req_s")
    busy = min(slots, rate * (_number(facts, "cached_prompt_s") + output * alone_s))
    taken = rate / _number(facts, "carried_req_s")
    return (
        *lines,
        (
            "yes" if taken < FREE_BELOW and busy < FREE_BELOW * slots else "no",
            f"does {rate:g} requests/s leave room for batch requests? It occupies at least "
            f"{busy:.1f} of {slots:.0f} slots, and takes at least {min(1.0, taken):.0%} of the "
            "machine's time.",
        ),
    )


_FIGURES: Mapping[str, Callable[[Mapping[str, Value]], Lines]] = {
    "response-cache": _response_cache,
    "semantic-cache": _semantic_cache,
    "selective-caching": _pins,
    "background-lane": _background,
    "kv-tiers": _tiers,
    "disaggregation": _disaggregation,
    "replicas": _replicas,
    "autoscaling": _replicas,
}

FLEET_TECHNIQUES = frozenset(_FIGURES)
"""Ids of techniques.toml that have figures here."""
