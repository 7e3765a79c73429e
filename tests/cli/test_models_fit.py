"""`ridgeline models --fit`: the lines of its table."""

from __future__ import annotations

import pytest

from ridgeline.cli.render.models import fitting_lines
from ridgeline.workflows.models.fitting_models import FittingModel, FittingModels, PredictedSpeed

HUBS = ("short/name", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", None)


@pytest.mark.parametrize("width", [None, 50, 80])
def test_no_name_is_broken(width: int | None) -> None:
    speeds = {"int8": PredictedSpeed(tokens_per_s=12.3, ttft_ms=4.0)}
    models = tuple(
        FittingModel(
            name=f"model-{i}", hub=hub, num_params=10**9, runs=hub is not None, speeds=speeds
        )
        for i, hub in enumerate(HUBS)
    )
    found = FittingModels(
        device="cpu", is_calibrated=False, memory_bytes=1, num_too_large=0, models=models
    )
    _, *lines = (line.plain for line in fitting_lines(found, width))
    own_line = {None: [], 50: [1, 2], 80: []}[width]
    assert [i for i, line in enumerate(lines) if "\n" in line] == own_line
    for line, shown in zip(lines, (*HUBS[:2], "(not by this engine)"), strict=True):
        assert str(shown) in line
        assert max(map(len, line.split("\n"))) <= (width or 80)
