"""What INT4 and INT8 cost beyond their weights: the same weights in float32 must say the same.

Perplexity of the demo model on held-out text, native kernels with int8 activations against dense
float32 products of the very weights that the packed numbers mean. Of both held-out texts, and so
much of them that the difference is known to a sixth of its bound (INT8: a quarter): what a token
costs more or less scatters by 0.04 nats, so that twelve windows, as this test had once, say 0.0010
with an error of 0.0007.
"""

from __future__ import annotations

import pytest
import torch

from ridgeline.engine.checkpoints import load
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.checkpoints.sources import CheckpointWeights
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.quant.int4.quantise import quantise as quantise_int4
from ridgeline.engine.quant.int8.quantise import quantise as quantise_int8
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import apply_quantization, with_activations, with_dtype

pytestmark = pytest.mark.slow

GROUP_SIZE = 128  # of INT4, the format that --quantization int4 chooses
QUANTISED = {"q", "k", "v", "o", "gate", "up", "down"}


def rounded_int4(weight: torch.Tensor) -> torch.Tensor:
    return quantise_int4(weight, GROUP_SIZE, zeros=False).dense(GROUP_SIZE)


def rounded_int8(weight: torch.Tensor) -> torch.Tensor:
    q_OI, scale_O = quantise_int8(weight, "full")
    return q_OI.float() * scale_O.unsqueeze(1)


ROUNDED = {"int4": rounded_int4, "int8": rounded_int8}


class Rounded(CheckpointWeights):
    """Dense float32 weights, rounded as the packed ones are."""

    def __init__(self, spec: ModelSpec, quantization: str) -> None:
        super().__init__(model_path("demo"), spec)
        self._rounded = ROUNDED[quantization]

    def get(self, part: Part) -> torch.Tensor:
        weight = super().get(part)
        return self._rounded(weight) if part.key in QUANTISED else weight


def held_out(name: str, num_windows: int, window: int) -> list[list[int]]:
    text = (model_path("demo").parent / "heldout" / name).read_text(encoding="utf-8")
    ids = load_tokenizer("demo").encode(text, add_special_tokens=False)
    assert len(ids) >= num_windows * window
    return [ids[i * window : (i + 1) * window] for i in range(num_windows)]


def nats_per_token(spec: ModelSpec, windows: list[list[int]]) -> float:
    return float(window_losses(spec, windows).mean())


def window_losses(spec: ModelSpec, windows: list[list[int]]) -> torch.Tensor:
    """Nats per token of each window."""
    decoder = load_decoder("demo", spec, device="cpu", compute_dtype=torch.float32)
    runner = TorchRunner(decoder, None, None)
    losses = [
        torch.nn.functional.cross_entropy(runner.logits(ids)[:-1], torch.tensor(ids[1:]))
        for ids in windows
    ]
    return torch.stack(losses)


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    return [each for name in ("docs.txt", "code.txt") for each in held_out(name, 96, 256)]


@pytest.fixture(scope="module")
def plain(windows: list[list[int]]) -> float:
    """Nats per token of every eighth window, unquantised."""
    return nats_per_token(with_dtype(load_spec("demo"), "float32"), windows[::8])


@pytest.mark.parametrize("quantization", sorted(ROUNDED))
@pytest.mark.parametrize(("activations", "most"), [("int16", 2e-5), ("float32", 2e-6)])
def test_more_digits_cost_nothing_at_all(
    activations: str,
    most: float,
    quantization: str,
    windows: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left differs from float32 by no more than its own roundings do."""
    some, dense = windows[::8], with_dtype(load_spec("demo"), "float32")
    quantised = apply_quantization(dense, quantization)
    exact = nats_per_token(with_activations(quantised, activations), some)
    in_bytes = nats_per_token(quantised, some)
    monkeypatch.setattr(load, "open_weights", lambda model, spec, *_: Rounded(spec, quantization))
    rounded = nats_per_token(dense, some)
    assert abs(exact - rounded) < most and abs(in_bytes - rounded) > 2 * most


@pytest.mark.parametrize("quantization", sorted(ROUNDED))
def test_int8_activations_cost_nothing_that_shows(
    quantization: str, windows: list[list[int]], plain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = with_dtype(load_spec("demo"), "float32")
    packed = nats_per_token(apply_quantization(dense, quantization), windows)
    monkeypatch.setattr(load, "open_weights", lambda model, spec, *_: Rounded(spec, quantization))
    losses = window_losses(dense, windows)
    rounded = float(losses.mean())
    assert (
        abs(packed / rounded - 1) < 1e-3 and abs(packed - rounded) < 1e-3
    )  # < 0.1 % of perplexity
    # Else nothing was rounded.
    assert float(losses[::8].mean()) != pytest.approx(plain, abs=1e-4)
