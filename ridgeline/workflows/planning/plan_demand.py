"""The demand on a fleet: from the options of `plan`, or from the traffic of a running server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec

from ridgeline.config.planning import PlanOptions
from ridgeline.errors import BadInput
from ridgeline.measure.monitors.traffic import TrafficSample
from ridgeline.modelspec.model import ModelSpec
from ridgeline.plan.fleet.cache_needs import check_pins
from ridgeline.plan.fleet.demand import (
    Demand,
    PinnedPrefixes,
    StoredAnswers,
    demand_of,
    demand_of_traffic,
)
from ridgeline.plan.simulate.answer_cache import QUESTION_TOKENS
from ridgeline.plan.step_time.tier_loads import require_no_rates, tier_hits
from ridgeline.records.traffic import TrafficProfile
from ridgeline.workflows.load.live_traffic import read_traffic, sample_live_traffic
from ridgeline.workflows.load.workload_lengths import ISL, OSL, workload_lengths

NUM_SAMPLES = 1000  # requests of a workload that its lengths are taken from
NUM_READINGS = 4  # differences between them show whether the server was restarted
_Z = 1.2816  # a standard normal lies within ±1.2816 with probability 0.8


class LiveTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic that a demand was taken from; `missing`: what the server does not report."""

    url: str
    duration_s: float
    profile: TrafficProfile
    missing: tuple[str, ...]

    @property
    def note(self) -> str:
        """What was read, and how far a count of Poisson arrivals may be off."""
        number = self.profile.num_requests
        off = _Z / math.sqrt(number) if number else 1.0
        text = (
            f"demand of {self.url}: {number:,} requests finished in {self.duration_s:.0f} s "
            f"(80 % interval of the rate: ±{off:.0%}); a plan for the busiest hour needs the "
            "metrics of that hour"
        )
        if self.missing:
            text += f"; not reported: {', '.join(self.missing)}"
        return text


def live_demand(
    options: PlanOptions,
    spec: ModelSpec,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Demand, LiveTraffic]:
    """Read the metrics of `--from-traffic` for a while.

    Raises CannotRun without traffic, BadInput where the server does not report lengths or a rate.
    """
    url = options.from_traffic
    assert url is not None
    duration = options.traffic_duration
    sample: TrafficSample = sample_live_traffic(
        lambda: read_traffic(url, options.api_key, clock()),
        url,
        (duration, duration / NUM_READINGS),
        clock,
        sleep,
    )
    demand = demand_of_traffic(sample.profile)
    # The upper bounds of bins may exceed any context; what the server answered did fit its own.
    longest = max(demand.isl + demand.osl, min(demand.longest, spec.max_positions))
    p95 = min(demand.isl_p95, max(demand.isl, spec.max_positions - demand.osl))
    demand = msgspec.structs.replace(demand, longest=longest, isl_p95=p95)
    return demand, LiveTraffic(
        url=url,
        duration_s=sample.duration_s,
        profile=sample.profile,
        missing=sample.missing,
    )


def demand_of_options(options: PlanOptions) -> Demand:
    """The demand of the options' workload or lengths. Raises BadInput if they contradict."""
    if options.workload is not None:
        if options.input_len is not None or options.output_len is not None:
            raise BadInput(
                "--input-len and --output-len cannot be combined with --workload",
                value=options.workload,
            )
        lengths = workload_lengths(options.workload, NUM_SAMPLES, options.seed)
    else:
        isl = ISL if options.input_len is None else options.input_len
        lengths = [(isl, OSL if options.output_len is None else options.output_len)]
    lengths = [(_reduced(prompt, options), output) for prompt, output in lengths]
    demand = demand_of(lengths, options.request_rate, options.cached_share)
    if options.keep_ratio is not None:
        new = options.new_document_share * (options.document_len or 0)
        demand = msgspec.structs.replace(demand, scored=math.ceil(new))
    return _with_tiers(demand, options)


def _reduced(prompt: int, options: PlanOptions) -> int:
    """Tokens of a prompt without dropped duplicates and without the compressed parts of its
    documents, which are at most the prompt."""
    left = prompt * (1 - options.dropped_context_share)
    if options.keep_ratio is not None:
        left -= min(left, options.document_len or 0) * (1 - options.keep_ratio)
    return max(1, round(left))


def with_options(demand: Demand, options: PlanOptions, spec: ModelSpec) -> Demand:
    """The demand with batch requests, stored answers, pinned prefixes, copies for a new version,
    and without the requests of a managed API. Raises BadInput."""
    demand = _with_caches(_with_batches(demand, options), options, spec)
    return msgspec.structs.replace(
        demand, fallback=options.fallback_share, shadow=options.canary_shadow_share
    )


def _with_batches(demand: Demand, options: PlanOptions) -> Demand:
    """The demand with its batch requests. Raises BadInput for a mean without them."""
    if options.mean_request_rate is not None and not options.batch_rate:
        raise BadInput(
            "--mean-request-rate has no effect without --batch-rate",
            value=options.mean_request_rate,
        )
    if options.background_tokens is not None and not options.batch_rate:
        raise BadInput(
            "--background-tokens has no effect without --batch-rate",
            value=options.background_tokens,
        )
    return msgspec.structs.replace(
        demand,
        batch_rate=options.batch_rate,
        mean_rate=options.mean_request_rate,
        background_tokens=options.background_tokens,
    )


def _with_caches(demand: Demand, options: PlanOptions, spec: ModelSpec) -> Demand:
    """The demand with the requests that a response cache answers, and with pinned prefixes.

    Raises BadInput for options that would have no effect, or leave nothing to plan for.
    """
    if options.question_len is not None and not options.semantic_cache_share:
        raise BadInput(
            "--question-len has no effect without --semantic-cache-share",
            value=options.question_len,
        )
    if options.pinned_prefixes != 1 and not options.pinned_len:
        raise BadInput(
            "--pinned-prefixes has no effect without --pinned-len", value=options.pinned_prefixes
        )
    if options.pinned_len >= demand.isl:
        raise BadInput(
            "--pinned-len leaves nothing of a prompt",
            value=options.pinned_len,
            limit=f"below the mean prompt of {demand.isl:,} tokens",
        )
    in_tiers = 0 if demand.tiers is None else demand.tiers.tokens
    if demand.cached < options.pinned_len and options.pinned_len + in_tiers >= demand.isl:
        raise BadInput(
            "--pinned-len and the tokens in tiers of the KV cache leave nothing of a prompt",
            value=f"{options.pinned_len:,} and {in_tiers:,}",
            limit=f"below the mean prompt of {demand.isl:,} tokens together",
        )
    check_pins(spec, options.pinned_len)
    question = options.question_len or QUESTION_TOKENS
    return msgspec.structs.replace(
        demand,
        answers=StoredAnswers(
            exact=options.response_cache_share,
            similar=options.semantic_cache_share,
            question=question if options.semantic_cache_share else 0,
        ),
        pinned=PinnedPrefixes(tokens=options.pinned_len, count=options.pinned_prefixes),
    )


def _with_tiers(demand: Demand, options: PlanOptions) -> Demand:
    """The demand with the prompt tokens that are found in tiers of the KV cache."""
    shares = (options.kv_tier_memory_share, options.kv_tier_file_share)
    rates = (options.kv_tier_memory_bandwidth, options.kv_tier_file_bandwidth)
    if not any(shares):
        require_no_rates(rates, "--kv-tier-memory-share or --kv-tier-file-share")
        return demand
    total = options.cached_share + sum(shares)
    if total > 1:
        raise BadInput(
            "--cached-share, --kv-tier-memory-share and --kv-tier-file-share exceed all tokens",
            value=f"{total:g}",
            limit="1 together",
        )
    memory, files = (int(share * demand.isl) for share in shares)
    memory = min(memory, demand.isl - 1 - demand.cached)
    files = min(files, demand.isl - 1 - demand.cached - memory)
    return msgspec.structs.replace(demand, tiers=tier_hits(memory, files, rates))
