"""The greedy step's short way gives what the samplers give, and only where it may be taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ridgeline.engine.kernels.native_linear import Packed, pack_lines
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.quant.packed import PackedLinear
from ridgeline.engine.sampling import load_sampler
from ridgeline.engine.sampling.argmax_head import (
    MAX_REUSED_BYTES,
    LogitsArgmax,
    NativeArgmax,
    make_argmax_head,
)
from ridgeline.engine.scheduler.plan import Run, SamplePoint
from ridgeline.records import OutputGrammar, Sampling

PLAIN = SamplePoint(Sampling(temperature=0.0), 0, 0, 1)
WIDTH, VOCAB = 64, 1_003


def decoder_of(
    weight_VC: torch.Tensor, softcap: float | None = None, dtype: torch.dtype = torch.float32
) -> Decoder:
    """A head and nothing else."""
    lines = pack_lines("fp32", weight_VC, 0)
    head = PackedLinear(Packed("fp32", *weight_VC.shape, 0, lines), None, dtype)
    spec = SimpleNamespace(final_softcap=softcap, vocab_size=len(weight_VC), logit_scale=1.0)
    logits = lambda x_SC: head(x_SC)  # noqa: E731
    return cast("Decoder", SimpleNamespace(lm_head=head, spec=spec, logits=logits))


@pytest.mark.parametrize("num_rows", [1, 3, 17, 2])
def test_argmax_path_chooses_as_the_reference(num_rows: int) -> None:
    decoder = decoder_of(torch.randint(-2, 3, (VOCAB, WIDTH)).float())  # whole numbers: many ties
    short = make_argmax_head(decoder)
    assert isinstance(short, NativeArgmax)
    for _ in range(3):  # memory is kept: nothing of the step before may show
        x_SC = torch.randint(-2, 3, (num_rows, WIDTH)).float()
        chosen = load_sampler("reference")(decoder.logits(x_SC), [PLAIN] * num_rows)
        assert short(x_SC) == [token for token, _ in chosen] == LogitsArgmax(decoder, VOCAB)(x_SC)


def test_memory_grows_and_shrinks_with_the_rows() -> None:
    decoder = decoder_of(torch.randn(VOCAB, WIDTH))
    short = make_argmax_head(decoder)
    too_many = MAX_REUSED_BYTES // (4 * VOCAB) + 1
    for num_rows in (5, 1, 40, too_many, 7):
        x_SC = torch.randn(num_rows, WIDTH)
        assert short(x_SC) == decoder.logits(x_SC).argmax(1).tolist()
    assert isinstance(short, NativeArgmax) and len(short._logits_SV) == 40


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_padding_of_the_vocabulary_is_never_chosen(softcap: float | None) -> None:
    decoder, x_SC = decoder_of(torch.randn(VOCAB, WIDTH), softcap), torch.randn(20, WIDTH)
    found = make_argmax_head(decoder, 400)(x_SC)
    assert found == decoder.logits(x_SC)[:, :400].argmax(1).tolist()
    assert found != make_argmax_head(decoder, VOCAB + 1)(x_SC) == make_argmax_head(decoder)(x_SC)


def test_row_of_nan_raises_with_its_index() -> None:
    x_SC = torch.randn(3, WIDTH)
    x_SC[1, 0] = torch.nan
    with pytest.raises(ArithmeticError, match="row 1"):
        make_argmax_head(decoder_of(torch.randn(VOCAB, WIDTH)))(x_SC)


def test_soft_capped_logits_take_the_general_path() -> None:
    """tanh rounds unequal logits to equal ones: the first largest may be another token."""
    assert isinstance(make_argmax_head(decoder_of(torch.randn(9, WIDTH), 30.0)), LogitsArgmax)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.7},
        {"logprobs": 0},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"allowed_token_ids": (1, 2)},
        {"structured": OutputGrammar("choice", '["a"]')},
    ],
)
def test_requests_that_need_logits_do_not_use_the_argmax_path(asked: dict[str, Any]) -> None:
    assert Sampling(temperature=0.0, stop=("x",)).is_plain_greedy
    assert not Sampling(**{"temperature": 0.0, **asked}).is_plain_greedy


def test_every_row_of_an_argmax_run_is_sampled() -> None:
    plain = SamplePoint(PLAIN.sampling, 0, 0, 1, is_argmax=True)
    assert Run(0, 0, (5,), (0,), plain).is_argmax
    assert not Run(0, 0, (5,), (0,), PLAIN).is_argmax
    assert not Run(0, 0, (5,), (0,), None).is_argmax
    assert Run(0, 0, (5, 6), (0,), plain, num_drafts=1).is_argmax
    assert not Run(0, 0, (5, 6), (0,), plain).is_argmax, "the end of a prompt"
    assert not Run(0, 0, (4, 5, 6), (0,), plain, num_drafts=1).is_argmax


def test_bfloat16_head_takes_the_general_path() -> None:
    """Packed weights are multiplied with rows of any dtype; the short way reads floats."""
    decoder = decoder_of(torch.randn(VOCAB, WIDTH), dtype=torch.bfloat16)
    x_SC = torch.randn(5, WIDTH, dtype=torch.bfloat16)
    assert make_argmax_head(decoder)(x_SC) == decoder.logits(x_SC).argmax(1).tolist()
