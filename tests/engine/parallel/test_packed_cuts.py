"""A part cut from a packed weight has the numbers of that part."""

from __future__ import annotations

import pytest
import torch

from ridgeline.engine.kernels.native_linear import Kind, NativeLinear, Packed, in_panels, pack_lines
from ridgeline.engine.parallel.packed import cut_inputs, cut_outputs, unpack_integers
from ridgeline.errors import CannotRun
from ridgeline.modelspec.shard import Span

NUM_OUT, NUM_IN, GROUP = 72, 160, 32


def make_packed(kind: Kind) -> Packed:
    generator = torch.Generator().manual_seed(3)
    if kind in ("bf16", "fp32"):
        weight_OI = torch.randn(NUM_OUT, NUM_IN, generator=generator)
        weight_OI = weight_OI.bfloat16() if kind == "bf16" else weight_OI
        return Packed(kind, NUM_OUT, NUM_IN, 0, pack_lines(kind, weight_OI, 0))
    factors = in_panels(torch.rand(NUM_OUT, generator=generator) + 0.5)
    q_OI = torch.randint(0, 16, (NUM_OUT, NUM_IN), generator=generator)
    if kind == "int8":
        lines = pack_lines(kind, (q_OI - 8).to(torch.int8), 0)
        return Packed(kind, NUM_OUT, NUM_IN, 0, lines, factors=factors)
    dtype = torch.uint8 if kind == "int4" else torch.int8
    scales = in_panels(torch.rand(NUM_OUT, NUM_IN // GROUP, generator=generator).half() + 0.1)
    lines = pack_lines(kind, q_OI.to(dtype), GROUP)
    return Packed(kind, NUM_OUT, NUM_IN, GROUP, lines, scales, factors=torch.ones_like(factors))


def weight_of(packed: Packed) -> torch.Tensor:
    return NativeLinear(packed).rows(torch.arange(packed.num_out))


@pytest.mark.parametrize("kind", ["int4", "int8_groups", "int8", "bf16", "fp32"])
def test_cut_outputs_are_the_rows_of_the_spans(kind: Kind) -> None:
    packed = make_packed(kind)
    whole_OI = weight_of(packed)
    own = cut_outputs(packed, [Span(16, 32), Span(48, 72)])
    assert torch.equal(weight_of(own), torch.cat((whole_OI[16:32], whole_OI[48:72])))


@pytest.mark.parametrize("kind", ["int4", "int8_groups", "bf16", "fp32"])
def test_cut_inputs_are_the_columns_of_the_span(kind: Kind) -> None:
    packed = make_packed(kind)
    whole_OI = weight_of(packed)
    for span in (Span(0, 64), Span(64, 160)):
        assert torch.equal(weight_of(cut_inputs(packed, span)), whole_OI[:, span.start : span.stop])


def test_unpacked_integers_times_their_scales_are_the_weight() -> None:
    packed = make_packed("int8")
    q_OI, scale_O = unpack_integers(packed)
    assert torch.equal(q_OI * scale_O[:, None], weight_of(packed))


def test_cut_within_a_panel_or_a_group_is_refused() -> None:
    packed = make_packed("int4")
    with pytest.raises(CannotRun, match="within 16 outputs"):
        cut_outputs(packed, [Span(0, 8)])
    with pytest.raises(CannotRun, match="within 32 inputs"):
        cut_inputs(packed, Span(0, 48))
