"""`explain --accelerator` reckons with the memory and peaks of a device that is not at hand."""

from __future__ import annotations

import pytest

from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput, DoesNotFit
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.workflows.explain.explain import ExplainLoad, ModelExplanation, explain_model

MODEL = "dummy:llama-3.1-8b"


def explained(accelerator: str, model: str = MODEL) -> ModelExplanation:
    return explain_model(Settings(model=model), ExplainLoad(accelerator=accelerator))


def test_bounds_are_those_of_the_devices_memory_and_bandwidth() -> None:
    h100 = find_accelerator("h100-sxm")
    facts = explained("h100-sxm").facts
    assert facts["bandwidth_bytes_s"] == h100.bandwidth_bytes_s
    weights = float(str(facts["model_weights_bytes"]))
    assert weights + float(str(facts["kv_cache_bytes"])) <= h100.memory_bytes
    alone_s = float(str(facts["alone_token_s"]))
    assert alone_s == pytest.approx(weights / h100.bandwidth_bytes_s, rel=0.1)
    assert float(str(explained("l4").facts["alone_token_s"])) > 5 * alone_s


def test_rungs_see_the_kind_of_the_device() -> None:
    explanation = explained("h100-sxm")
    assert explanation.facts["device"] == "cuda"
    [threads] = [t for t in explanation.techniques if t.rung == "thread-plan"]
    assert threads.verdict == "not now" and "device" in threads.reason


def test_weights_that_exceed_the_device_and_unknown_names_are_refused() -> None:
    with pytest.raises(DoesNotFit):
        explained("l4", "dummy:llama-3.1-70b")
    with pytest.raises(BadInput):
        explained("h1000")
