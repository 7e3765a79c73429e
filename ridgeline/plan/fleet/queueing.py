"""A replica under Poisson arrivals: what its promise's quantiles are at a mean number in flight.

The steps are those of `mixing`. With x chunks of prompts in a mean step of s(x) seconds, arrivals
come at x / s(x) chunks per second, so that one number x tells all the rest; it is the one at which
Little's law gives the mean number in flight.

    rho      share of the time that prompts would take in steps full of them: rate · least_s. At 1
             the queue of prompts has no end, however many seats there are
    TTFT     the wait quantile of an M/G/1 queue of prompts, a mean step under way, and the prompt
    TPOT     the quantile of the mean of osl - 1 steps in a row. The prompts of a step are those
             that came during the one before it, so its length s follows
                 s' = decode + prompt · Poisson(rate · s)
             an autoregression of first order with coefficient rho, whose variance is
             rho · prompt · mean(s) / (1 - rho²). An answer begins behind its own prompt's step,
             which was a long one: what it adds to the steps behind it dies out as rho^i. A gamma
             distribution has the mean and the variance; no step is longer than a full one
"""

from __future__ import annotations

import msgspec
from scipy.special import gammaincinv

from ridgeline.plan.fleet.demand import wait_mean, wait_quantile
from ridgeline.plan.step_time.mixed_steps import MixedSteps

_BISECTIONS = 30


class PoissonLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: requests per second, and means in seconds. `tpot_variance`: of the requests'
    TPOTs; `full_s`: the longest step."""

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

    def ttft_quantile(self, share: float, prompt_s: float, input_cv2: float) -> float:
        """For a prompt that takes `prompt_s`."""
        wait_s = wait_quantile(self.rho / self.least_s, self.least_s, share, input_cv2)
        return wait_s + self.step_s + prompt_s

    def tpot_quantile(self, share: float, busier_s: float) -> float:
        """`busier_s`: what one standard deviation more in flight adds to a step."""
        variance = self.tpot_variance + busier_s**2
        found_s = max(self.tpot_s, _gamma_quantile(self.tpot_s, variance, share))
        return min(found_s, self.full_s + busier_s)


def load_in_flight(
    mixed: MixedSteps, osl: int, num_groups: int, batch: float, input_cv2: float
) -> PoissonLoad:
    """At a mean of `batch` requests in flight, in `num_groups` attention groups."""
    low, high = 0.0, mixed.most
    for _ in range(_BISECTIONS):
        chunks = (low + high) / 2
        at = _at(mixed, osl, num_groups, chunks, input_cv2)
        fewer = at.rate * (at.ttft_s + (osl - 1) * at.tpot_s) <= batch
        low, high = (chunks, high) if fewer else (low, chunks)
    return _at(mixed, osl, num_groups, low, input_cv2)


def _at(
    mixed: MixedSteps, osl: int, num_groups: int, chunks: float, input_cv2: float
) -> PoissonLoad:
    step_s, least_s, later = mixed.arriving(chunks), mixed.least_s, osl - 1
    prompts = chunks / mixed.num_chunks / step_s  # per second, of one micro-batch
    rho = prompts * least_s
    carried_s = tpot_variance = 0.0
    if later and rho < 1:
        lasting = rho * (1 - rho**later) / (1 - rho) / later
        carried_s = max(0.0, mixed.prompt_s - step_s) * lasting
        alike = min(1.0, (1 + rho) / (1 - rho) / later)
        tpot_variance = alike * rho * least_s * step_s / (1 - rho * rho)
    full_s = mixed.seconds(mixed.most)
    wait_s = wait_mean(prompts, least_s, input_cv2)
    return PoissonLoad(
        rate=prompts * num_groups * mixed.num_rounds,
        rho=rho,
        prompt_s=mixed.prompt_s,
        added_s=mixed.added_s,
        least_s=least_s,
        step_s=step_s,
        full_s=full_s,
        ttft_s=wait_s + step_s / 2 + mixed.prompt_s,
        tpot_s=min(step_s + carried_s, full_s),
        tpot_variance=tpot_variance,
    )


def _gamma_quantile(mean: float, variance: float, share: float) -> float:
    if variance <= 0:
        return mean
    return float(gammaincinv(mean * mean / variance, share)) * variance / mean
