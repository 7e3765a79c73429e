"""Every family in every quantised format of other projects equals its dequantised checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.errors import BadModel, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.format import WHOLE_KINDS
from ridgeline.modelspec.rewrite import (
    linears,
    with_activations,
    with_dtype,
)
from tests.conformance.quantised_formats import (
    FORMATS,
    UNREAD,
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


@pytest.mark.parametrize("family", UNREAD)
def test_quantised_checkpoints_of_other_structures_are_refused(
    source: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    directory = source(family)
    config = directory / "config.json"
    fields = json.loads(config.read_text("utf-8"))
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    for file in directory.iterdir():
        (quantised / file.name).symlink_to(file)
    (quantised / "config.json").unlink()
    changed = {**fields, "quantization_config": FORMATS["GPTQ"][1]}
    (quantised / "config.json").write_text(json.dumps(changed), "utf-8")
    with pytest.raises((BadModel, CannotRun), match=UNREAD[family]):
        logits(quantised)
