"""`ridgeline eval`: the floor is low, the control fails, INT4 is told from INT8."""

from __future__ import annotations

import pytest

from ridgeline.cli.evaluate import evaluate
from ridgeline.errors import BadInput
from ridgeline.settings import Settings


def test_the_panel_on_the_demo_model() -> None:
    panel = evaluate(Settings(model="demo"), Settings(model="demo", quantization="int4"))
    kl = {check.name: check.found.mid for check in panel.candidate.checks}
    floor = {check.name: check.found.mid for check in panel.floor.checks}
    assert floor["KL mean (nats)"] < 1e-6 and panel.floor.verdict == "pass"
    assert panel.control.verdict == "fail"
    assert panel.verdict == panel.candidate.verdict == "fail"  # a small model feels 4 bits
    assert 0.01 < kl["KL mean (nats)"] < 0.2
    assert list(panel.kl_by_context) == ["1-16", "17-64", "65-127"]


def test_vocabularies_must_agree() -> None:
    with pytest.raises(BadInput, match="vocabularies"):
        evaluate(Settings(model="demo"), Settings(model="dummy:qwen2.5-0.5b"))
