"""Every family in every quantised format of other projects equals its dequantised checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.format import WHOLE_KINDS
from ridgeline.modelspec.rewrite import (
    linears,
    with_activations,
    with_dtype,
)
from tests.conformance.quantised_formats import (
    configuration_of,
    matrix,
    quantise,
    sizes_of,
)
from tests.conformance.tiny_models import make_model

pytestmark = pytest.mark.slow

TOKENS = [(7 * i) % 60 + 3 for i in range(24)]
CASES = [(family, name) for family, names in matrix().items() for name in names]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family's tiny model, written once."""
    made: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            name = configuration_of(family)
            assert name is not None
            make_model(name, made[family], **sizes_of(name))
        return made[family]

    return directory


def logits(directory: Path) -> Tensor:
    """Logits in float32; packed weights multiply activations without rounding them to codes."""
    spec = with_dtype(load_spec(str(directory)), "float32")
    if any(linear.format.kind in WHOLE_KINDS for linear in linears(spec).values()):
        spec = with_activations(spec, "float32")
    decoder = load_decoder(str(directory), spec, device="cpu", compute_dtype=torch.float32)
    return TorchRunner(decoder, None, None).logits(TOKENS)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_quantised_checkpoint_equals_its_dequantised_weights(
    source: Callable[[str], Path], tmp_path: Path, family: str, name: str
) -> None:
    quantised, dense = tmp_path / "quantised", tmp_path / "dense"
    assert quantise(source(family), quantised, dense, name) >= 12
    expected, found = logits(dense), logits(quantised)
    assert (found - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("seed", [1000, 2000])
@pytest.mark.parametrize("name", ["AWQ", "NVFP4"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "qwen3_5_text"])
def test_other_random_weights(
    source: Callable[[str], Path], tmp_path: Path, family: str, name: str, seed: int
) -> None:
    quantised, dense = tmp_path / "quantised", tmp_path / "dense"
    assert quantise(source(family), quantised, dense, name, seed) >= 12
    expected, found = logits(dense), logits(quantised)
    assert (found - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("name", ["GPTQ", "compressed-tensors"])
def test_quantisation_of_the_text_of_an_image_model(
    source: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """Its quantization_config stands in text_config, as Kimi K2.5 has it."""
    quantised = tmp_path / "quantised"
    quantise(source("qwen3"), quantised, tmp_path / "dense", name)
    expected = logits(quantised)
    file = quantised / "config.json"
    text = json.loads(file.read_text())
    assert "quantization_config" in text
    wrapper = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {**text, "model_type": "qwen3_vl_text"},
        "vision_config": {},
    }
    file.write_text(json.dumps(wrapper))
    assert torch.equal(logits(quantised), expected)


@pytest.mark.parametrize("name", ["GPTQ", "FP8 blocks"])
@pytest.mark.parametrize("each", [False, True], ids=["stacked", "each"])
def test_experts_next_to_a_dense_mlp(tmp_path: Path, name: str, each: bool) -> None:
    """Gemma 4's experts stay dense where they are stacked, the MLP next to them is packed."""
    directory = tmp_path / "source"
    make_model("gemma4-moe", directory, **sizes_of("gemma4-moe"))
    if each:
        split_experts(directory / "model.safetensors")
    quantised, dense = tmp_path / "quantised", tmp_path / "dense"
    assert quantise(directory, quantised, dense, name) == 52 + each * 6 * 6 * 3
    expected, found = logits(dense), logits(quantised)
    assert (found - expected).norm() < 1e-3 * expected.norm()


def split_experts(file: Path) -> None:
    """Store stacked experts as one matrix per projection and expert."""
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        stacked = tensors.pop(name)
        keys = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for expert, whole in enumerate(stacked):
            for key, part in zip(keys, whole.chunk(len(keys)), strict=True):
                module = name.rpartition(".")[0]
                tensors[f"{module}.{expert}.{key}.weight"] = part.contiguous()
    save_file(tensors, file, {"format": "pt"})
