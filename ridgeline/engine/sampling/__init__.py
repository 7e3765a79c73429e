"""Registry of samplers: name -> "module:function". Nothing is imported until chosen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import Tensor

    from ridgeline.engine.sampling.base import Choice, Sampler
    from ridgeline.engine.scheduler.plan import SamplePoint
    from ridgeline.records import TokenLogprobs

SAMPLERS = {
    "native": "ridgeline.engine.sampling.native:sample",
    "batched": "ridgeline.engine.sampling.batched:sample",
    "reference": "ridgeline.engine.sampling.reference:sample",
}


@cache
def load_sampler(name: str) -> Sampler:
    """The sampler `name`."""
    module, _, attribute = SAMPLERS[name].partition(":")
    return cast("Sampler", getattr(import_module(module), attribute))


def sample(logits_SV: Tensor, points: Sequence[SamplePoint]) -> list[Choice]:
    """Choose one token per row: with native code on the CPU, elsewhere with `batched`."""
    name = "native" if logits_SV.device.type == "cpu" else "batched"
    return load_sampler(name)(logits_SV, points)


def first_largest(logits_SV: Tensor) -> list[int]:
    """The first largest logit of each row. Raises ArithmeticError if it is not finite."""
    module = SAMPLERS["native" if logits_SV.device.type == "cpu" else "batched"].partition(":")[0]
    return list(import_module(module).KERNELS.greedy(logits_SV))


def probabilities(logits_RV: Tensor, points: Sequence[SamplePoint]) -> Tensor:
    """The distributions, float64 [R, V], that rows with a temperature are drawn from."""
    from ridgeline.engine.sampling.batched import probabilities as of_rows

    return of_rows(logits_RV, points)


def token_logprobs(
    logits_PV: Tensor, tokens: Sequence[int] | Tensor, k: int
) -> list[TokenLogprobs]:
    """Raw log-probabilities of `tokens`, one per position, with the `k` largest of each."""
    from ridgeline.engine.sampling.logprobs import token_logprobs as of_tokens

    return of_tokens(logits_PV, tokens, k)
