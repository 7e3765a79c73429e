"""The compute dtype and its derivation."""

from __future__ import annotations

import pytest
import torch

from ridgeline.engine.dtype import native_dtypes, resolve_dtype
from ridgeline.errors import CannotRun

PLAIN = frozenset({"float32"})
MODERN = frozenset({"float32", "bfloat16"})


@pytest.mark.parametrize(
    ("asked", "stored", "native", "dtype", "says"),
    [
        ("auto", "float32", PLAIN, torch.float32, "as stored"),
        ("auto", "bfloat16", MODERN, torch.bfloat16, "as stored"),
        ("auto", "bfloat16", PLAIN, torch.float32, "stored as bfloat16, computed in float32"),
        ("auto", "float16", MODERN, torch.float32, "no float16 arithmetic"),
        ("float32", "bfloat16", MODERN, torch.float32, "as requested"),
        ("bfloat16", "float32", PLAIN, torch.bfloat16, "emulated and slower"),
        ("float16", "float32", PLAIN, torch.float16, "emulated and slower"),
    ],
)
def test_dtype_resolution(
    asked: str, stored: str, native: frozenset[str], dtype: torch.dtype, says: str
) -> None:
    got, why = resolve_dtype(asked, stored, "cpu", native=native)
    assert got == dtype and says in why


def test_unknown_dtype_is_rejected() -> None:
    with pytest.raises(CannotRun, match=r"float8.*float32, bfloat16, float16"):
        resolve_dtype("float8", "float32", "cpu")


def test_float32_is_always_native() -> None:
    assert "float32" in native_dtypes(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["gemma3", "mixtral", "gemma2"])
def test_half_precision_model_stays_close_to_float32(
    family: str, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from ridgeline.engine.attention import build_attention
    from ridgeline.engine.attention.cache import KvCache
    from ridgeline.engine.checkpoints.load import load_decoder
    from ridgeline.engine.execution.runner import TorchRunner
    from ridgeline.modelspec.checkpoints.load import load_spec
    from tests.conformance.tiny_models import Loaded, load_ours, make_model

    directory = tmp_path_factory.mktemp(family)
    make_model(family, directory)
    spec = load_spec(str(directory))
    decoder = load_decoder(str(directory), spec, device="cpu", compute_dtype=dtype)
    cache = KvCache.allocate(spec, 8, 4, dtype, "cpu")
    half = Loaded(TorchRunner(decoder, cache, build_attention("torch", spec, cache)), 8, 4)
    tokens, blocks = list(range(3, 24)), (5, 2, 7, 0, 1, 3)
    exact = torch.log_softmax(load_ours(directory).runner.logits(tokens), -1)
    paged = torch.log_softmax(half.paged_logits(tokens, [9, 11, 1], blocks), -1)
    whole = torch.log_softmax(half.runner.logits(tokens), -1)
    limit = 0.25 if dtype == torch.bfloat16 else 0.05
    assert float((paged - exact).abs().mean()) < limit
    assert float((whole - exact).abs().mean()) < limit


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_a_cpu_says_that_it_is_not_batch_invariant(dtype: str) -> None:
    from ridgeline.config.settings import settings_from
    from ridgeline.engine.config import resolve

    derivations = resolve(settings_from({"model": "demo", "dtype": dtype})).derivations
    assert "not batch-invariant" in derivations["dtype"]
    assert "batch-invariant" not in resolve(settings_from({"model": "demo"})).derivations["dtype"]
