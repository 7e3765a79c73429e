"""Coded layouts: files decode to the encoder's values, and load with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgeline.compress.formats.coded import BLOCKS, CodedWeight
from ridgeline.compress.formats.floats import code_fp8, code_nf4
from ridgeline.compress.formats.k_quants import k_lattice
from ridgeline.compress.methods.gptq import HessianFactor, factor_of, round_gptq
from ridgeline.compress.methods.rtn import round_rtn
from ridgeline.compress.recipe import QuantizeRecipe, check
from ridgeline.compress.statistics import InputStats
from ridgeline.config.improve import QuantizeOptions
from ridgeline.engine.checkpoints import QuantizedWeights, read_quantisation
from ridgeline.engine.checkpoints.gguf.weights import GgufWeights
from ridgeline.engine.checkpoints.sources import CheckpointWeights
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.checkpoints.gguf_header import read_gguf
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.modelspec.rewrite import with_dtype
from ridgeline.workflows.quantize.quantize import quantize

pytestmark = pytest.mark.slow

SIZES = {"q": (256, 256), "v": (128, 256), "down": (256, 704), "gate": (704, 256)}


def normal(num_out: int = 24, num_in: int = 512) -> torch.Tensor:
    return torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(3))


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


@pytest.mark.parametrize(("kind", "most"), [("q4_k", 0.075), ("q6_k", 0.018)])
def test_k_quants(kind: str, most: float) -> None:
    value = normal()
    value[3, 256:] = 0  # a block of nothing
    value[4, :32] = 0.25  # a group of one value
    on = k_lattice(value, kind, None)
    coded = on.grid(on.round(value), QuantizeRecipe())
    assert isinstance(coded, CodedWeight)
    assert coded.tensors[BLOCKS].shape == (24, 512 // 256 * {"q4_k": 144, "q6_k": 210}[kind])
    assert relative(coded.dense(), on.dense(on.round(value))) < 1e-6  # the bytes say the same
    assert relative(coded.dense(), value) < most
    assert not coded.dense()[3, 256:].any()


def test_k_quants_beat_plain_groups_of_the_same_width() -> None:
    """A scale and a minimum of 6 bits per 32 cost no more than Q4_0's fp16 scale."""
    value = normal() + 0.3
    found = round_rtn(value, None, check(QuantizeRecipe(numbers="q4_k")))
    plain = round_rtn(value, None, QuantizeRecipe(group_size=32))
    assert relative(found.dense(), value) < 0.9 * relative(plain.dense(), value)


def test_gptq_works_on_k_quants() -> None:
    x_TI = normal(600, 512) @ (torch.eye(512) + 0.3 * normal(512, 512) / 512**0.5)
    stats = InputStats.empty(512, True)
    stats.add(x_TI)
    stats.complete()
    value, recipe = normal(), check(QuantizeRecipe(method="gptq", numbers="q4_k"))

    def loss(dense_OI: torch.Tensor) -> float:
        return float((x_TI @ (dense_OI - value).T).norm())

    nearest = round_rtn(value, stats, recipe)
    factor = factor_of(stats, recipe)
    assert isinstance(factor, HessianFactor)
    assert loss(round_gptq(value, stats, factor, recipe).dense()) < 0.9 * loss(nearest.dense())


def test_floats() -> None:
    value = normal()
    four = code_nf4(value, "bfloat16")
    assert relative(four.dense(), value) < 0.095
    step = four.dense() - value
    absmax = value.reshape(-1, 64).abs().amax(1).repeat_interleave(64).view_as(value)
    assert (step.abs() <= absmax * 0.1520).all()  # half of the widest gap between values
    value[:, 7] *= 50
    errors = [relative(code_fp8(value, f"fp8-{k}").dense(), value) for k in ("tensor", "channel")]
    assert max(errors) < 0.03
    odd = normal(130, 200)
    block = code_fp8(odd, "fp8-block")
    assert tuple(block.tensors[".weight_scale_inv"].shape) == (2, 2)
    assert relative(block.dense(), odd) < 0.03


WRITTEN = {
    "q4_k": ("gguf", "Q4_K"),
    "q6_k": ("gguf", "Q6_K"),
    "nf4": ("bitsandbytes", None),
    "fp8-tensor": ("compressed-tensors", None),
    "fp8-channel": ("compressed-tensors", None),
    "fp8-block": ("fp8", None),
}


@pytest.mark.parametrize("numbers", WRITTEN)
def test_loaded_as_encoded(tmp_path: Path, numbers: str) -> None:
    """Every weight bit for bit what rounding the original again gives."""
    format, kind = WRITTEN[numbers]
    quantize("demo", tmp_path / "m", QuantizeOptions(numbers=numbers, format=format))
    dense = with_dtype(load_spec("demo"), "float32")
    recipe = check(QuantizeRecipe(numbers=numbers))  # type: ignore[arg-type]
    name = str(tmp_path / "m" / "model.gguf" if format == "gguf" else tmp_path / "m")
    spec = with_dtype(load_spec(name), "float32")
    if format == "gguf":
        kinds = {k: t.kind for k, t in read_gguf(name).tensors.items()}
        assert kinds["blk.0.attn_q.weight"] == kind
        assert kinds["blk.0.ffn_down.weight"] == {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}[str(kind)]
        loaded: GgufWeights | QuantizedWeights = GgufWeights(name, spec)
    else:
        foreign = read_quantisation(Path(name))
        assert foreign is not None
        loaded = QuantizedWeights(Path(name), spec, foreign)
    with loaded, CheckpointWeights(model_path("demo"), dense) as source:
        for key, shape in SIZES.items():
            part = Part(key, shape, 2)
            own = recipe.at(key, 2, shape[1])
            value = source.get(part).float()
            if numbers == "nf4":
                truth = code_nf4(value, "bfloat16").dense()
            elif numbers.startswith("fp8"):
                truth = code_fp8(value, numbers).dense()
            else:
                truth = round_rtn(value, None, own).dense()
            assert torch.equal(loaded.get(part).float(), truth), key


@pytest.mark.parametrize(
    ("choices", "kind"),
    [
        (QuantizeOptions(method="rtn", group_size=32, zeros=True, format="gguf"), "Q4_1"),
        (QuantizeOptions(method="rtn", bits=5, group_size=32, format="gguf"), "Q5_0"),
    ],
)
def test_gguf_grids(tmp_path: Path, choices: QuantizeOptions, kind: str) -> None:
    quantize("demo", tmp_path / "m", choices)
    name = str(tmp_path / "m" / "model.gguf")
    assert read_gguf(name).tensors["blk.1.ffn_up.weight"].kind == kind
    dense = with_dtype(load_spec("demo"), "float32")
    recipe = QuantizeRecipe(
        bits=choices.bits, group_size=32, zeros=choices.zeros, scale_bits=7 if choices.zeros else 11
    )
    with GgufWeights(name, dense) as loaded, CheckpointWeights(model_path("demo"), dense) as source:
        for key in ("q", "up"):
            part = Part(key, (704, 256) if key == "up" else (256, 256), 1)
            truth = round_rtn(source.get(part).float(), None, recipe).dense()
            assert torch.equal(loaded.get(part), truth)


def test_numbers_that_a_format_does_not_hold(tmp_path: Path) -> None:
    for choices, message in (
        (QuantizeOptions(numbers="nf4"), "no kernel here"),
        (QuantizeOptions(bits=5, group_size=32), "no kernel here"),
        (QuantizeOptions(numbers="q4_k", format="awq"), "does not hold"),
        (QuantizeOptions(bits=5, group_size=32, format="gptq"), "2, 3, 4 and 8"),
        (QuantizeOptions(bits=4, group_size=64, format="gguf"), "no such grid"),
        (QuantizeOptions(numbers="fp8-block", format="gguf"), "no such grid"),
    ):
        with pytest.raises(CannotRun, match=message):
            quantize("demo", tmp_path / "m", choices)
        assert not (tmp_path / "m").exists()
    with pytest.raises(BadInput, match="is not made by"):
        quantize(
            "demo",
            tmp_path / "m",
            QuantizeOptions(numbers="nf4", method="gptq", format="bitsandbytes"),
        )
    with pytest.raises(BadInput, match="zero-points"):
        quantize("demo", tmp_path / "m", QuantizeOptions(numbers="q6_k", zeros=True, format="gguf"))
