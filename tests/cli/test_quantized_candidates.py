"""Quantised candidates: made once, reused, and rejected if there is not enough time."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from ridgeline.compress import pipeline
from ridgeline.config.settings import Settings
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.errors import BadInput, CannotRun
from ridgeline.measure.workload import parse_workload
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.optimize.environment import MakeWeights
from ridgeline.optimize.ladder import candidates_of, load_default_ladder
from ridgeline.workflows.load.tokenized_workload import TokenizedWorkload
from ridgeline.workflows.optimize.quantized_candidates import recipe_of, weight_maker

INT4 = Settings(model="demo", quantization="int4", max_num_seqs=4)


@pytest.fixture
def make(tmp_path: Path) -> MakeWeights:
    tokenizer = load_tokenizer("demo")
    return weight_maker(
        TokenizedWorkload(parse_workload("chat-and-code"), tokenizer), tokenizer, tmp_path
    )


@pytest.mark.slow
def test_candidate_is_quantized_once_and_loads_as_a_model(
    make: MakeWeights, tmp_path: Path
) -> None:
    found = make(INT4, "rtn", 60.0)
    assert found.quantization is None and found.max_num_seqs == 4
    assert load_spec(found.model).layers[0].mlp.gate.format.kind == "int4"
    written = (Path(found.model) / "config.json").stat().st_mtime_ns
    assert make(INT4, "rtn", 0.0) == found
    assert (Path(found.model) / "config.json").stat().st_mtime_ns == written


@pytest.mark.slow
def test_changed_source_model_is_quantized_again(make: MakeWeights, tmp_path: Path) -> None:
    """Its files have the names and sizes of before."""
    own = tmp_path / "own"
    shutil.copytree(model_path("demo"), own)
    asked = msgspec.structs.replace(INT4, model=str(own))
    before = make(asked, "rtn", 60.0)
    file = own / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.mlp.up_proj.weight"] *= 1.5
    size = file.stat().st_size
    save_file(tensors, file, metadata={"format": "pt"})
    assert file.stat().st_size == size
    after = make(asked, "rtn", 60.0)
    assert after.model != before.model
    assert make(asked, "rtn", 0.0) == after


def test_large_files_are_fingerprinted_by_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "NUM_READ", 4)
    monkeypatch.setattr(pipeline, "READ_BYTES", 8)
    file, content = tmp_path / "weights", bytearray(range(100))
    digests = set()
    for place in (None, 3, 27, 52, 80):  # as it is; one byte of each piece
        changed = bytearray(content)
        if place is not None:
            changed[place] ^= 1
        file.write_bytes(changed)
        digests.add(pipeline.content_digest(file))
    file.write_bytes(content + b"more")
    assert len(digests | {pipeline.content_digest(file)}) == 6


@pytest.mark.slow
def test_slow_quantization_is_rejected_and_leaves_nothing_behind(
    make: MakeWeights, tmp_path: Path
) -> None:
    with pytest.raises(CannotRun, match="quantising the weights takes about"):
        make(INT4, "hqq", -1.0)
    assert not list(tmp_path.glob("demo-int4-hqq-*/config.json"))


def test_every_method_of_the_ladder_can_make_its_format() -> None:
    made = [
        candidate
        for rung in load_default_ladder().rungs
        for candidate in candidates_of(rung, Settings(model="demo"), {})
        if candidate.make is not None
    ]
    recipes = [recipe_of(row.settings, row.make or "") for row in made]
    assert {(recipe.method, recipe.bits) for recipe in recipes} == {
        *((method, 4) for method in ("gptq", "awq", "hqq", "qat")),
        *((method, 8) for method in ("smoothquant", "llm-int8")),
    }


def test_unknown_formats_are_rejected(make: MakeWeights) -> None:
    with pytest.raises(BadInput, match="cannot be quantised to this format"):
        make(Settings(model="demo"), "gptq", 60.0)
