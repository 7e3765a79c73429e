"""The demand on a fleet: request rate and lengths, and whether latencies meet an SLO."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ridgeline.errors import BadInput
from ridgeline.plan.step_time.tier_loads import TierHits
from ridgeline.records import Slo
from ridgeline.records.traffic import TrafficProfile

MAX_RATE = 1e9  # requests per second


class StoredAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the requests that a response cache answers: exactly, or by a similar question.

    `question`: tokens that are embedded for each request without an exact answer.
    """

    exact: float = 0.0
    similar: float = 0.0
    question: int = 0

    def __post_init__(self) -> None:
        if min(self.exact, self.similar) < 0 or self.exact + self.similar >= 1:
            raise BadInput(
                "the shares that a response cache answers leave nothing to plan for",
                value=f"{self.exact + self.similar:g}",
                limit="below 1 together",
            )

    @property
    def computed_share(self) -> float:
        return 1 - self.exact - self.similar

    @property
    def embedded_tokens(self) -> int:
        """Of questions, for each request that is computed."""
        return math.ceil(self.question * (1 - self.exact) / self.computed_share)


class PinnedPrefixes(msgspec.Struct, frozen=True, kw_only=True):
    """Prefixes of that many tokens, one of which every prompt begins with, that stay in the cache.

    At most a quarter of the cache is pinned: what the engine's defaults let one account pin.
    """

    tokens: int = 0
    count: int = 1


NO_ANSWERS, NO_PINS = StoredAnswers(), PinnedPrefixes()


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """`rate` requests per second with mean lengths `isl` and `osl`, in tokens.

    `isl_p95`: 95th percentile prompt. `cached`: mean number of prompt tokens found in the prefix
    cache, `tiers` behind them in tiers of it. `longest`: the largest context (prompt and answer).
    `input_cv2`: squared coefficient of variation of the prompt lengths, which lengthens queues.
    `batch_rate`: batch requests of the same lengths per second, on average, which use what is left
    while there is less than `rate`; `mean_rate`: the mean rate over their completion window.
    `background_tokens`: of batch requests in a step, at most. `answers`: what a response cache
    answers of the `rate`, without a step; lengths are those of the others. `pinned`: prefixes that
    all requests find, and that take their part of the cache. `scored`: tokens of documents that are
    read for each request to compress them. `fallback`: share of the rate that a managed API
    answers. `shadow`: share whose copy a new version answers, on replicas for it alone.
    """

    rate: float
    isl: int
    osl: int
    isl_p95: int
    longest: int
    cached: int = 0
    input_cv2: float = 0.0
    tiers: TierHits | None = None
    batch_rate: float = 0.0
    mean_rate: float | None = None
    background_tokens: int | None = None
    answers: StoredAnswers = NO_ANSWERS
    pinned: PinnedPrefixes = NO_PINS
    scored: int = 0
    fallback: float = 0.0
    shadow: float = 0.0

    @property
    def computed_share(self) -> float:
        """Of the requests, those that neither a cache nor an API answers."""
        return self.answers.computed_share * (1 - self.fallback)

    @property
    def computed_rate(self) -> float:
        """Requests per second that neither a cache nor an API answers."""
        return self.rate * self.computed_share

    @property
    def computed_isl(self) -> int:
        """Prompt tokens of a computed request, with those that are read before it: of questions to
        embed them, and of documents to compress them."""
        return self.isl + self.answers.embedded_tokens + self.scored

    def canary_replicas(self, rate: float) -> int:
        """Replicas of that rate that a new version needs for its copies."""
        return math.ceil(self.shadow * self.computed_rate / rate)

    @property
    def found(self) -> int:
        """Prompt tokens in the prefix cache, pinned ones included."""
        return min(self.isl - 1, max(self.cached, self.pinned.tokens))

    def replicas_at(self, rate: float, step_s: float) -> int:
        """Replicas of that rate: enough for the peak, and for the mean with the batch requests. A
        step of `step_s` seconds takes batch requests as far as it stays within the SLO, so both
        count the same, but no more of their tokens than `background_tokens`."""
        mean_rate = self.rate if self.mean_rate is None else self.mean_rate
        mean_rate *= self.computed_share
        needed = max(self.computed_rate, mean_rate + self.batch_rate) / rate
        if self.background_tokens is not None and self.batch_rate:
            per_request = self.isl - self.found + self.osl
            lane_rate = self.background_tokens / step_s / per_request
            needed = max(needed, self.batch_rate / lane_rate)
        return math.ceil(needed) + self.canary_replicas(rate)

    def __post_init__(self) -> None:
        if not 0 < self.rate <= MAX_RATE:
            raise BadInput(
                "the request rate must be positive",
                value=self.rate,
                limit=f"> 0 /s, at most {MAX_RATE:g}",
            )
        if self.batch_rate < 0 or not 0 <= (self.mean_rate or 0.0) <= self.rate:
            raise BadInput(
                "the mean rate of requests cannot exceed their peak",
                value=f"{self.mean_rate:g}/s" if self.mean_rate else self.batch_rate,
                limit=f"0..{self.rate:g}/s",
            )
        if not (0 <= self.fallback < 1 and 0 <= self.shadow <= 1):
            raise BadInput(
                "the shares of an API and of copies leave nothing to plan for",
                value=f"{self.fallback:g} and {self.shadow:g}",
                limit="0..1, and below 1 of the API",
            )
        if min(self.isl, self.osl) < 1 or not 0 <= self.cached < self.isl:
            raise BadInput(
                "a demand needs isl >= 1, osl >= 1 and 0 <= cached < isl",
                value=(self.isl, self.osl, self.cached),
            )


def demand_of(lengths: Sequence[tuple[int, int]], rate: float, cached: float = 0.0) -> Demand:
    """The demand of a workload of (prompt, answer) lengths; `cached` is the share of prompt tokens
    found in the prefix cache."""
    if not lengths:
        raise BadInput("the workload has no requests")
    shortest = min(min(pair) for pair in lengths)
    if shortest < 1:
        raise BadInput(
            "prompts and answers need at least one token", value=shortest, limit=">= 1 (isl, osl)"
        )
    if not 0 <= cached <= 1:
        raise BadInput("cached must be a share of the prompt tokens", value=cached, limit="0..1")
    prompts = sorted(length for length, _ in lengths)
    mean = sum(prompts) / len(prompts)
    variance = sum((length - mean) ** 2 for length in prompts) / len(prompts)
    isl = max(1, round(mean))
    return Demand(
        rate=rate,
        isl=isl,
        osl=max(1, round(sum(answer for _, answer in lengths) / len(lengths))),
        isl_p95=prompts[min(len(prompts) - 1, int(0.95 * len(prompts)))],
        longest=max(prompt + answer for prompt, answer in lengths),
        cached=min(isl - 1, int(cached * isl)),
        input_cv2=variance / mean**2,
    )


def demand_of_traffic(traffic: TrafficProfile) -> Demand:
    """The demand of a server's traffic, of which only the shape is known.

    Quantiles and the longest request come from bins of lengths, where the server has them. Raises
    BadInput if the rate or a length is unknown.
    """
    prompt, output, rate = traffic.prompt, traffic.output, traffic.rate
    named = {"prompt lengths": prompt, "output lengths": output, "request rate": rate}
    missing = [name for name, value in named.items() if not value]
    if prompt is None or output is None or not rate:
        raise BadInput(
            "the server's metrics do not say enough of its traffic",
            value=f"no {' and no '.join(missing)}",
            fix="give --request-rate, --input-len and --output-len instead",
        )
    isl, osl = max(1, round(prompt.mean)), max(1, round(output.mean))
    return Demand(
        rate=rate,
        isl=isl,
        osl=osl,
        isl_p95=max(isl, round(prompt.quantile(0.95))),
        longest=max(isl + osl, round(prompt.quantile(1.0) + output.quantile(1.0))),
        cached=min(isl - 1, int((traffic.shared_share or 0.0) * isl)),
        input_cv2=prompt.cv**2,
    )


def wait_quantile(rate: float, service_s: float, share: float, cv2: float = 0.0) -> float:
    """The wait that `share` of the arrivals of an M/G/1 queue do not exceed; inf if it is unstable.

    For M/D/1, P(wait > t) ~ rho · exp(-2 (1 - rho) t / service) (heavy-traffic exponent); variance
    of the service time stretches it by 1 + cv2, like the Pollaczek-Khinchine mean.
    """
    rho = rate * service_s
    if rho >= 1:
        return math.inf
    if rho <= 1 - share:
        return 0.0
    return math.log(rho / (1 - share)) * service_s * (1 + cv2) / (2 * (1 - rho))


def wait_mean(rate: float, service_s: float, cv2: float = 0.0) -> float:
    """Mean wait in an M/G/1 queue (Pollaczek-Khinchine); inf if it is unstable."""
    rho = rate * service_s
    return math.inf if rho >= 1 else rho * service_s * (1 + cv2) / (2 * (1 - rho))


def meets_slo(slo: Slo, ttft_s: float, tpot_s: float, osl: int) -> bool:
    """True if the latencies meet every limit of the SLO; answers of one token have no TPOT."""
    e2e_s = ttft_s + (osl - 1) * tpot_s
    return not slo.misses(ttft_s, tpot_s if osl > 1 else None, e2e_s)
