"""Latent rows in a coded cache are refused with a format that holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline import Engine, Sampling
from ridgeline.errors import CannotRun
from tests.conformance.tiny_models import make_model

pytestmark = pytest.mark.slow


def test_the_fix_of_a_refused_format_is_a_format_that_runs(tmp_path: Path) -> None:
    make_model("youtu", tmp_path)
    for refused in ("int8", "fp8", "int4"):
        with pytest.raises(CannotRun, match="latent attention") as error:
            Engine.open(str(tmp_path), kv_cache_dtype=refused, max_model_len=64)
        assert error.value.fix == "use --kv-cache-dtype bfloat16"
    with Engine.open(str(tmp_path), kv_cache_dtype="bfloat16", max_model_len=64) as engine:
        sampling = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
        assert len(engine.generate([[3, 4, 5]], sampling)[0].tokens) == 2
