"""`ridgeline capacity`: how many devices hold a model, and how many sequences they take."""

from __future__ import annotations

import json

import pytest

from ridgeline.cli.main import main
from ridgeline.config.planning import CapacityOptions
from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.step_time.memory import MemoryLimits, memory_budget, require_fit
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.replica import build_replica
from ridgeline.workflows.planning.capacity import capacity


@pytest.mark.parametrize("model", ["llama-3.1-70b", "gemma-3-27b", "deepseek-v3", "qwen3-30b-a3b"])
@pytest.mark.parametrize("device", ["h100-sxm", "mi300x", "b200"])
def test_sequences_fit_and_one_more_does_not(model: str, device: str) -> None:
    options = CapacityOptions(model=model, accelerator=device, context="1000,7000")
    result = capacity(options)
    if not result.rows:
        assert device in result.too_small
        return
    (row,) = result.rows
    replica = build_replica(
        load_planning_spec(model), find_accelerator(device), Layout(tp=row.num_devices)
    )
    budget = memory_budget(replica, MemoryLimits())
    for context, num_seqs in row.num_seqs.items():
        if num_seqs:
            require_fit(replica, budget, context, num_seqs)
        with pytest.raises(Exception, match="does not fit"):
            require_fit(replica, budget, context, num_seqs + 1)
    require_fit(replica, budget, row.longest)
    assert row.longest == replica.spec.max_positions or row.num_seqs[7000] <= row.longest // 7000


def test_fewest_devices_are_taken_and_smaller_weights_need_fewer() -> None:
    def devices(quantization: str | None) -> int:
        options = CapacityOptions(
            model="llama-3.1-70b", accelerator="h100-sxm", quantization=quantization, context="2048"
        )
        (row,) = capacity(options).rows
        return row.num_devices

    assert (devices(None), devices("fp8"), devices("int4")) == (4, 2, 1)


def test_devices_too_small_are_named_with_the_reason() -> None:
    result = capacity(CapacityOptions(model="llama-3.1-405b", accelerator="t4,b200"))
    assert [row.device for row in result.rows] == ["b200"]
    assert "one sequence of 2,048 tokens" in result.too_small["t4"]


@pytest.mark.parametrize("context", ["0", "2048,900000", "many"])
def test_lengths_are_checked(context: str) -> None:
    with pytest.raises(BadInput, match="--context"):
        capacity(CapacityOptions(model="llama-3.1-8b", context=context))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "llama-3.1-8b"]) == 0
    out = capsys.readouterr().out
    assert "the smallest that holds it is 1 x" in out and "the cheapest" in out
    assert main(["capacity", "llama-3.1-405b", "--accelerator", "t4"]) == 2
    assert "no device holds" in capsys.readouterr().out
    assert main(["capacity", "llama-3.1-8b", "--accelerator", "l4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["device"] == "l4"
