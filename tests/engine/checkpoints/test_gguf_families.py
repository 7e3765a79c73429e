"""GGUF of every family that is written: part by part and as a whole, there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.config.improve import QuantizeOptions
from ridgeline.engine.checkpoints.gguf.weights import GgufWeights
from ridgeline.engine.checkpoints.sources import CheckpointWeights
from ridgeline.engine.checkpoints.tensor_names import parts
from ridgeline.modelspec.checkpoints.gguf_architectures.rows import ARCHITECTURES
from ridgeline.modelspec.checkpoints.gguf_header import read_gguf
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.workflows.quantize.quantize import quantize
from tests.engine.checkpoints.test_gguf_files import CASES, logits, random_model, truth_of

WRITTEN = (
    "llama-bias",
    "qwen2",
    "qwen3",
    "smollm3",
    "olmo2",
    "olmo2-windows",
    "granite",
    "seed_oss",
    "exaone4",
    "ernie4_5",
    "arcee",
    "gpt-oss",
)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp_min(1e-9))


@pytest.mark.parametrize("case", WRITTEN)
def test_written_file_holds_the_model_that_it_was_made_of(case: str, tmp_path: Path) -> None:
    """Every part within what 8 bits move it; norms, biases and sinks exactly."""
    config, keys = CASES[case]
    source: Any = random_model(config)
    source.save_pretrained(tmp_path / "source")
    options = QuantizeOptions(bits=8, method="rtn", format="gguf")
    quantize(str(tmp_path / "source"), tmp_path / "out", options)
    name = str(tmp_path / "out" / "model.gguf")
    dense, spec = load_spec(str(tmp_path / "source")), load_spec(name)
    file, architecture = read_gguf(name), case if case == "gpt-oss" else case.partition("-")[0]
    assert file.metadata["general.architecture"] == architecture and architecture in ARCHITECTURES
    for key, value in keys.items():
        if key != "rope.scaling.finetuned":  # which says nothing about how the model runs
            assert file.metadata[f"{architecture}.{key}"] == pytest.approx(value, rel=1e-6)
    theirs = GgufWeights(name, spec)
    with CheckpointWeights(tmp_path / "source", dense) as ours:
        for part in parts(dense):
            limit = 0.02 if len(part.shape) > 1 else 1e-6
            assert distance(theirs.get(part), ours.get(part)) < limit, part
    assert distance(logits(name), truth_of(source)) < 0.15
