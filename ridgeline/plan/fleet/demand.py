"""What is asked of a fleet: requests per second of certain lengths, under a promise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ridgeline.errors import BadInput
from ridgeline.records import Slo

MOST_RATE = 1e9  # requests per second


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per request: means, and of prompts also the 95th percentile. `rate` requests/s.

    `cached` is the mean number of prompt tokens that a prefix cache holds already; `longest` the
    largest context (prompt and answer) that occurs; `input_cv2` the squared coefficient of
    variation of prompt lengths, which lengthens queues.
    """

    rate: float
    isl: int
    osl: int
    isl_p95: int
    longest: int
    cached: int = 0
    input_cv2: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.rate <= MOST_RATE:
            raise BadInput(
                "the request rate must be positive",
                value=self.rate,
                limit=f"> 0 /s, at most {MOST_RATE:g}",
            )
        if min(self.isl, self.osl) < 1 or not 0 <= self.cached < self.isl:
            raise BadInput(
                "a demand needs prompts, answers, and fewer cached than prompt tokens",
                value=(self.isl, self.osl, self.cached),
            )


def demand_of(lengths: Sequence[tuple[int, int]], rate: float, cached: float = 0.0) -> Demand:
    """From (prompt, answer) lengths; `cached` is the share of prompt tokens that is hit."""
    if not lengths:
        raise BadInput("the workload has no requests")
    shortest = min(min(pair) for pair in lengths)
    if shortest < 1:
        raise BadInput("prompts and answers need tokens", value=shortest, limit=">= 1 (isl, osl)")
    if not 0 <= cached <= 1:
        raise BadInput("no share of the prompts' tokens", value=cached, limit="cached: 0 to 1")
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


def wait_quantile(rate: float, service_s: float, share: float, cv2: float = 0.0) -> float:
    """Seconds that `share` of the arrivals of an M/G/1 queue wait at most; inf where it overflows.

    M/D/1 has P(wait > t) ~ rho · exp(-2 (1 - rho) t / service) (heavy-traffic exponent); variance
    of the service stretches it by 1 + cv2, as it does the Pollaczek-Khinchine mean.
    """
    rho = rate * service_s
    if rho >= 1:
        return math.inf
    if rho <= 1 - share:
        return 0.0
    return math.log(rho / (1 - share)) * service_s * (1 + cv2) / (2 * (1 - rho))


def wait_mean(rate: float, service_s: float, cv2: float = 0.0) -> float:
    """Mean seconds of that wait (Pollaczek-Khinchine); inf where the queue overflows."""
    rho = rate * service_s
    return math.inf if rho >= 1 else rho * service_s * (1 + cv2) / (2 * (1 - rho))


def meets_slo(slo: Slo, ttft_s: float, tpot_s: float, osl: int) -> bool:
    """Whether latencies keep every limit of the promise; answers of one token have no TPOT."""
    e2e_s = ttft_s + (osl - 1) * tpot_s
    return not slo.misses(ttft_s, tpot_s if osl > 1 else None, e2e_s)
