"""MFU and MBU of a run on a server without step records, from token counts.

The FLOPs of a token do not depend on its batch, so that MFU is exact except for prefix-cache hits
(`cached_share`, if the server reports it). Bytes depend on the steps, because weights are read once
per step: they are the number of steps, which vLLM and llama.cpp count, times the weights, plus the
keys and values read by each output token. Without a count of steps there is no MBU: guessing the
batch would be guessing the result.

Both are over the whole run, including idle time.
"""

from __future__ import annotations

import msgspec

from ridgeline.records import RequestTrace, RunTrace
from ridgeline.roofline import Peaks, PriceStep, Work, bound


class RemoteUtilisation(msgspec.Struct, frozen=True, kw_only=True):
    """Compulsory FLOPs and bytes of a run, and their shares of the device's peaks."""

    flops: float
    mfu: float
    nbytes: float | None
    mbu: float | None
    num_steps: int | None


def remote_utilisation(
    run: RunTrace,
    price: PriceStep,
    peaks: Peaks,
    *,
    cached_share: float = 0.0,
    num_steps: float | None = None,
) -> RemoteUtilisation | None:
    """Utilisation of a run; None without output. `num_steps`: steps of the engine in the run."""
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
    return RemoteUtilisation(
        flops=flops,
        mfu=total.mfu(run.duration_s),
        nbytes=nbytes,
        mbu=None if nbytes is None else total.mbu(run.duration_s),
        num_steps=None if nbytes is None or num_steps is None else round(num_steps),
    )


def _flops(request: RequestTrace, price: PriceStep, cached_share: float) -> float:
    """Prefill of the uncached prompt, and each further token at the mean context length."""
    cached = request.cached_tokens or round(cached_share * request.prompt_tokens)
    new = max(1, request.prompt_tokens - cached)
    prefill = price([(new, request.prompt_tokens - new)], 1).flops
    return prefill + (request.output_tokens - 1) * price([(1, _mean_context(request))], 1).flops


def _kv_bytes(request: RequestTrace, price: PriceStep) -> float:
    """Bytes of keys and values that the output tokens read."""
    per_token = price([(1, _mean_context(request))], 1).bytes - price([(1, 0)], 1).bytes
    return (request.output_tokens - 1) * per_token


def _mean_context(request: RequestTrace) -> int:
    return request.prompt_tokens + request.output_tokens // 2
