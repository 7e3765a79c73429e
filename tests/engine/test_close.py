"""A closed engine frees its memory at once, because the next engine measures what is free."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch import Tensor

from ridgeline.config.settings import settings_from
from ridgeline.engine.engine import Engine
from ridgeline.records import Sampling


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
)
def test_closed_engine_frees_its_weights(more: dict[str, Any]) -> None:
    settings = settings_from({"model": "demo", "max_model_len": 256, "max_num_seqs": 4, **more})

    def used() -> list[weakref.ref[Any]]:
        with Engine.from_settings(settings) as engine:
            asked = Sampling(temperature=0.0, max_tokens=8, stop=("\n\n",))
            engine.generate(["def one():"], [asked])
            runner: Any = engine._runner
            kept = [runner.decoder, runner.cache]
            kept += [value for value in vars(runner.cache).values() if isinstance(value, Tensor)]
            return [weakref.ref(each) for each in kept]

    gc.collect()
    gc.disable()
    try:
        assert [each() for each in used()] == [None] * len(used())
    finally:
        gc.enable()
