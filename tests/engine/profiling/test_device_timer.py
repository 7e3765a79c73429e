"""Kernel times by operator, and layers that compute the same while they are timed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.layers.fused import FusedForward
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.kernels.pointwise import TORCH
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.profiling.device_timer import PREFIX, device_operators_timed, sum_by_range
from ridgeline.engine.scheduler.plan import Run, SamplePoint, StepPlan
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.records import Sampling
from tests.conformance.tiny_models import make_model

POINT = SamplePoint(Sampling(temperature=0.0, max_tokens=None), 0, 0, 1, is_argmax=True)


def event(name: str, parent: Any = None, *kernels_us: float) -> SimpleNamespace:
    kernels = [SimpleNamespace(duration=duration) for duration in kernels_us]
    device = SimpleNamespace(name="CPU")
    return SimpleNamespace(name=name, cpu_parent=parent, kernels=kernels, device_type=device)


def test_kernels_count_for_the_innermost_range() -> None:
    outer = event(PREFIX + "rope+kv_write")
    inner = event(PREFIX + "qkv", outer)
    events = [
        outer,
        inner,
        event("aten::mm", inner, 30.0),
        event("cuLaunchKernelEx", outer, 4.0, 1.0),
        event("aten::argmax", None, 7.0),
    ]
    times = sum_by_range(events)
    assert {name: round(own.time_s * 1e6, 3) for name, own in times.items()} == {
        "qkv": 30.0,
        "rope+kv_write": 5.0,
        "sampling": 7.0,
    }
    assert times["qkv"].calls == 1


@pytest.fixture
def runner(tmp_path: Path) -> TorchRunner:
    make_model("llama", tmp_path)
    spec = load_spec(str(tmp_path))
    plain = load_decoder(
        str(tmp_path), spec, device="cpu", compute_dtype=torch.float32, layer_backend="torch"
    )
    cache = KvCache.allocate(spec, 12, 4, torch.float32, "cpu")
    decoder = Decoder(plain.body, FusedForward(plain.body, TORCH), plain.lm_head, plain.nbytes)
    return TorchRunner(decoder, cache, build_attention("tables", spec, cache))


def test_a_timed_step_chooses_the_same_token(runner: TorchRunner) -> None:
    plan = StepPlan(0, (Run(0, 0, (3, 4, 5), (2,), POINT), Run(1, 0, (9,), (7,), POINT)))
    before, kept = runner.run(plan), (runner.attention, runner.decoder.forward, runner.greedy)
    with device_operators_timed(runner) as read:
        assert runner.run(plan) == before
        assert read() == {}  # a CPU has no kernels
    assert (runner.attention, runner.decoder.forward, runner.greedy) == kept
    assert runner.run(plan) == before


def test_other_layers_are_refused(runner: TorchRunner) -> None:
    decoder = load_decoder(
        "demo", load_spec("demo"), device="cpu", compute_dtype=torch.float32, layer_backend="torch"
    )
    with (
        pytest.raises(CannotRun, match="--layer-backend triton"),
        device_operators_timed(TorchRunner(decoder, None, None)),
    ):
        pass
