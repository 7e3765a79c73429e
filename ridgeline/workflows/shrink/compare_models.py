"""Quality and speed of smaller models next to the original in fewer bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.engine import Engine
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import resident_weight_bytes
from ridgeline.modelspec.rewrite import apply_quantization, with_dtype
from ridgeline.records import Sampling

PROMPT_TOKENS, ANSWER_TOKENS, ROUNDS = 32, 64, 3


class ModelToCompare(msgspec.Struct, frozen=True):
    """A model and the format of its weights."""

    name: str
    model: str
    quantization: Literal["bf16", "int8", "int4"] = "bf16"


class ComparedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One row: figures of held-out text, and of one sequence.

    `kl`: of the original's next-token distributions from this model's, in nats; `agreement`: share
    of positions with the original's most likely token. `tokens_per_s`: decoding one sequence, None
    if not measured. `weight_bytes`: in memory.
    """

    name: str
    weight_bytes: float
    perplexity: float
    kl: float
    agreement: float
    tokens_per_s: float | None = None


def compare_models(
    models: Sequence[ModelToCompare], windows: Sequence[Sequence[int]], *, speed: bool
) -> tuple[ComparedModel, ...]:
    """Compare models on held-out windows; the first is the original, in whose terms all are judged.

    With `speed`, each decodes one sequence in turn, three times; the median counts.
    """
    reference: list[Tensor] = []
    rows = [_quality(model, windows, reference) for model in models]
    if not speed:
        return tuple(rows)
    rates: list[list[float]] = [[] for _ in models]
    for _ in range(ROUNDS):
        for model, found in zip(models, rates, strict=True):
            found.append(_decode_rate(model, list(windows[0][:PROMPT_TOKENS])))
    return tuple(
        msgspec.structs.replace(row, tokens_per_s=median(found))
        for row, found in zip(rows, rates, strict=True)
    )


@torch.inference_mode()
def _quality(
    model: ModelToCompare, windows: Sequence[Sequence[int]], reference: list[Tensor]
) -> ComparedModel:
    spec = with_dtype(load_spec(model.model), "float32")
    spec = apply_quantization(spec, model.quantization)
    decoder = load_decoder(model.model, spec, device="cpu", compute_dtype=torch.float32)
    runner, is_first = TorchRunner(decoder, None, None), not reference
    loss = kl = agreement = 0.0
    for at, tokens in enumerate(windows):
        logprobs_TV = torch.log_softmax(runner.logits(tokens)[:-1], -1)
        if is_first:
            reference.append(logprobs_TV.half())
        truth_TV = reference[at].float()
        loss += float(F.nll_loss(logprobs_TV, torch.tensor(tokens[1:])))
        kl += float((truth_TV.exp() * (truth_TV - logprobs_TV)).sum(-1).mean())
        agreement += float((truth_TV.argmax(-1) == logprobs_TV.argmax(-1)).float().mean())
    count = len(windows)
    return ComparedModel(
        name=model.name,
        weight_bytes=resident_weight_bytes(spec),
        perplexity=math.exp(min(700.0, loss / count)),
        kl=0.0 if is_first else kl / count,
        agreement=1.0 if is_first else agreement / count,
    )


def _decode_rate(model: ModelToCompare, prompt: list[int]) -> float:
    """Tokens per second of one sequence, without its prefill."""
    sampling = Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    first = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
    with Engine.open(
        model.model,
        quantization=model.quantization,
        max_num_seqs=1,
        max_model_len=4 * ANSWER_TOKENS,
        enable_prefix_caching=False,
    ) as engine:
        engine.generate([prompt], [first])
        begun_s = perf_counter()
        engine.generate([prompt], [first])
        prefilled_s = perf_counter()
        engine.generate([prompt], [sampling])
        took_s = (perf_counter() - prefilled_s) - (prefilled_s - begun_s)
    return (ANSWER_TOKENS - 1) / took_s
