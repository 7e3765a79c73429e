"""Latency quantiles of a replica under Poisson arrivals, at a mean number of requests in flight.

Steps are priced by `ridgeline.plan.step_time.mixed_steps`. With x prompt chunks in a mean step of
s(x) seconds, x / s(x) chunks arrive per second, so x determines everything else; it is chosen so
that Little's law yields the given mean number in flight.

    rho      utilisation by prompts, rate · least_s: the share of time that prompts would need in
             steps full of prompts. At 1 the queue diverges, whatever the number of slots
    TTFT     the wait quantile of an M/G/1 queue of prompts, plus one mean step, plus the prompt. If
             a step holds several prompts, all that arrive during it are computed together in the
             next one: the wait is then at least the rest of the step (of a length L that arrivals
             see, L = s weighted by itself) plus the prompts of the others who arrived during it,
             with s, as below, from a gamma distribution
    TPOT     the quantile of the mean of osl - 1 consecutive steps. The prompts of a step are those
             that arrived during the previous one, so its length s follows
                 s' = decode + prompt · Poisson(rate · s)
             a first-order autoregression with coefficient c = rate · prompt and variance
             c · prompt · mean(s) / (1 - c²), `prompt` being what one more prompt adds. An answer
             starts right after its own prompt's long step, whose effect on the following steps
             decays as rho^i. Times with many arrivals have both more prompts in the steps and more
             requests in flight: the two spreads are correlated. The distribution is modelled as a
             gamma distribution with this mean and variance, capped by the length of a full step
"""

from __future__ import annotations

import math

import msgspec
from scipy.special import gammaincinv

from ridgeline.plan.fleet.demand import wait_mean, wait_quantile
from ridgeline.plan.step_time.mixed_steps import MixedSteps

_BISECTIONS = 30
_MAX_RHO = 0.98
_PROMPTS_AND_IN_FLIGHT = math.sqrt(3 / 8)
"""Correlation of the prompts computed during an answer of T seconds, which arrive in [0, T], with
the mean number of requests in flight, to which one that arrives at u within T contributes
1 - |u| / T."""


class PoissonLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one replica: requests per second, and mean times in seconds.

    `added_s`: seconds that a prompt adds to its steps; `least_s`: seconds per prompt in full steps;
    `full_s`: the longest step; `tpot_variance`: variance of TPOT over requests. `together_s` and
    its variance: TTFT beyond the prompt's own step where steps hold several prompts; else 0.
    """

    rate: float
    rho: float
    prompt_s: float
    added_s: float
    least_s: float
    step_s: float
    full_s: float
    ttft_s: float
    tpot_s: float
    tpot_variance: float
    together_s: float = 0.0
    together_variance: float = 0.0

    def ttft_quantile(self, share: float, prompt_s: float, input_cv2: float) -> float:
        """The TTFT that `share` of the requests meet, for a prompt that takes `prompt_s`."""
        wait_s = wait_quantile(self.rho / self.least_s, self.least_s, share, input_cv2)
        together_s = _gamma_quantile(self.together_s, self.together_variance, share)
        return max(wait_s + self.step_s, together_s) + prompt_s

    def tpot_quantile(self, share: float, busier_s: float) -> float:
        """The TPOT that `share` of the requests meet. `busier_s`: seconds that one standard
        deviation more in flight adds to a step."""
        together_s2 = math.sqrt(self.tpot_variance) * busier_s
        variance = self.tpot_variance + busier_s**2 + 2 * _PROMPTS_AND_IN_FLIGHT * together_s2
        quantile_s = max(self.tpot_s, _gamma_quantile(self.tpot_s, variance, share))
        return min(quantile_s, self.full_s + busier_s)


def load_in_flight(
    mixed: MixedSteps, osl: int, num_groups: int, batch: float, input_cv2: float
) -> PoissonLoad:
    """The load at which a mean of `batch` requests is in flight, over `num_groups` attention
    groups."""
    low, high = 0.0, mixed.max_chunks
    for _ in range(_BISECTIONS):
        chunks = (low + high) / 2
        at = _at(mixed, osl, num_groups, chunks, input_cv2)
        fewer = at.rate * (at.ttft_s + (osl - 1) * at.tpot_s) <= batch
        low, high = (chunks, high) if fewer else (low, chunks)
    return _at(mixed, osl, num_groups, low, input_cv2)


def _at(
    mixed: MixedSteps, osl: int, num_groups: int, chunks: float, input_cv2: float
) -> PoissonLoad:
    step_s, least_s, later = mixed.poisson_seconds(chunks), mixed.least_s, osl - 1
    prompts = chunks / mixed.num_chunks / step_s  # per second, of one micro-batch
    rho = prompts * least_s
    carried_s = tpot_variance = 0.0
    if later and rho < 1:
        lasting = rho * (1 - rho**later) / (1 - rho) / later
        carried_s = max(0.0, mixed.prompt_s - step_s) * lasting
        one_more_s = mixed.another_s if mixed.holds_several else mixed.added_s
        carried = min(prompts * one_more_s, _MAX_RHO)
        alike = min(1.0, (1 + carried) / (1 - carried) / later)
        tpot_variance = alike * carried * one_more_s * step_s / (1 - carried**2)
    full_s = mixed.seconds(mixed.max_chunks)
    wait_s = wait_mean(prompts, least_s, input_cv2) + step_s / 2
    together_s, together_variance = _together(mixed, prompts, step_s, input_cv2)
    return PoissonLoad(
        rate=prompts * num_groups * mixed.num_rounds,
        rho=rho,
        prompt_s=mixed.prompt_s,
        added_s=mixed.added_s,
        least_s=least_s,
        step_s=step_s,
        full_s=full_s,
        ttft_s=max(wait_s, together_s) + mixed.prompt_s,
        tpot_s=min(step_s + carried_s, full_s),
        tpot_variance=tpot_variance,
        together_s=together_s,
        together_variance=together_variance,
    )


def _together(
    mixed: MixedSteps, rate: float, step_s: float, input_cv2: float
) -> tuple[float, float]:
    """Mean and variance of (1 - U) L + prompt · Poisson(rate · L), U uniform, L the length of the
    step in which a request arrives; 0 if steps do not hold several prompts."""
    if not mixed.holds_several or not rate:
        return 0.0, 0.0
    prompt_s = mixed.another_s
    squared = prompt_s**2 * (1 + input_cv2)
    rho = min(rate * prompt_s, _MAX_RHO)
    scale = rate * squared / (1 - rho * rho)  # variance of a step over its mean
    length_s = step_s + scale
    share, share_squared = 0.5 + rho, 1 / 12 + (0.5 + rho) ** 2
    mean = share * length_s
    variance = share_squared * length_s * (length_s + scale) - mean**2 + squared * rate * length_s
    return mean, variance


def _gamma_quantile(mean: float, variance: float, share: float) -> float:
    if variance <= 0 or mean <= 0:
        return mean
    return float(gammaincinv(mean * mean / variance, share)) * variance / mean
