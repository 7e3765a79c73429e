"""A closed engine frees its memory at once, because the next engine measures what is free."""

from __future__ import annotations

import gc
import subprocess
import sys
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


LEAVES_A_REQUEST = """
import ridgeline
from ridgeline.records import Sampling
engine = ridgeline.Engine.open("demo", max_model_len=2048)
events = engine.iterate("def f(", Sampling(max_tokens=2000, ignore_eos=True))
next(events)
"""


FROM_PARTS = """
from ridgeline.config.settings import settings_from
from ridgeline.engine.build import assemble
from ridgeline.engine.config import resolve
from ridgeline.engine.engine import Engine
from ridgeline.records import Sampling
resolved = resolve(settings_from({"model": "demo", "max_model_len": 2048}))
engines = [Engine(resolved, assemble(resolved)) for _ in range(2)]
for engine in engines:
    events = engine.iterate("def f(", Sampling(max_tokens=2000, ignore_eos=True))
    next(events)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [LEAVES_A_REQUEST, FROM_PARTS], ids=["opened", "from parts"])
def test_program_that_ends_during_a_request_ends_cleanly(program: str) -> None:
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
