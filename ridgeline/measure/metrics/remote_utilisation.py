"""MFU and MBU of a run on a server that keeps no step records, from tokens alone.

FLOPs need no steps: a prompt token and an output token cost what they cost, whoever shares the
step. So they are exact, up to what the prefix cache gave (`cached_share`, where the server tells
it). Bytes do need them: the weights are read once per step, so their traffic is the number of
steps, which vLLM and llama.cpp count, times the weights; the keys and values that each output token
reads come on top. Without a count of steps there is no MBU, for a guess of the batch would be a
guess of the result.

Both are over the whole run (`mfu_wall` in steps.py): idle time counts.
"""

from __future__ import annotations

import msgspec

from ridgeline.records import RequestTrace, RunTrace
from ridgeline.roofline import Peaks, PriceStep, Work, bound


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs and bytes that the run could not do without, and their share of the device's peaks."""

    flops: float
    mfu: float
    nbytes: float | None
    mbu: float | None
    num_steps: int | None


def use_of(
    run: RunTrace,
    price: PriceStep,
    peaks: Peaks,
    *,
    cached_share: float = 0.0,
    num_steps: float | None = None,
) -> Use | None:
    """None where nothing was generated. `num_steps`: of the engine, during the run."""
    served = [request for request in run.requests if request.output_tokens]
    if not served or run.duration_s <= 0:
        return None
    flops = sum(_flops(request, price, cached_share) for request in served)
    nbytes = None
    if num_steps is not None and num_steps >= 1:
        decoded = sum(request.output_tokens - 1 for request in served)
        batch = max(1, round(decoded / num_steps))
        weights = price([(1, 0)] * batch, batch).bytes
        nbytes = num_steps * weights + sum(_kv_bytes(request, price) for request in served)
    total = bound(Work(flops, nbytes or 0.0), peaks)
    return Use(
        flops=flops,
        mfu=total.mfu(run.duration_s),
        nbytes=nbytes,
        mbu=None if nbytes is None else total.mbu(run.duration_s),
        num_steps=None if nbytes is None or num_steps is None else round(num_steps),
    )


def _flops(request: RequestTrace, price: PriceStep, cached_share: float) -> float:
    """One prefill of what was not cached, and each further token at the mean of its contexts."""
    cached = request.cached_tokens or round(cached_share * request.prompt_tokens)
    new = max(1, request.prompt_tokens - cached)
    prefill = price([(new, request.prompt_tokens - new)], 1).flops
    return prefill + (request.output_tokens - 1) * price([(1, _middle(request))], 1).flops


def _kv_bytes(request: RequestTrace, price: PriceStep) -> float:
    """What the output tokens read of the keys and values before them."""
    each = price([(1, _middle(request))], 1).bytes - price([(1, 0)], 1).bytes
    return (request.output_tokens - 1) * each


def _middle(request: RequestTrace) -> int:
    return request.prompt_tokens + request.output_tokens // 2
