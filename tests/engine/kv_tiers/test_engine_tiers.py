"""Tiers in a whole engine: warm after a restart, right whatever happens to the files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ridgeline.engine.engine import Engine
from ridgeline.engine.kv_tiers.directory import ExtentDirectory
from ridgeline.engine.kv_tiers.storage import TieredStorage
from ridgeline.errors import BadInput
from ridgeline.records import Sampling

PROMPTS = [[(7 * i * i + 3 * i + salt) % 3000 + 5 for i in range(300)] for salt in (1, 2, 3)]
GREEDY = Sampling(temperature=0.0, max_tokens=4)
BYTES = 4_000_000  # of KV cache: one prompt at a time


def serve(**settings: Any) -> tuple[list[list[int]], int, dict[str, float]]:
    """Tokens of every prompt, served one after the other; tokens cached; the counters."""
    with Engine.open("demo", max_model_len=512, kv_cache_memory_bytes=BYTES, **settings) as engine:
        answers, cached = [], 0
        for prompt in PROMPTS:
            [done] = engine.generate([prompt], GREEDY)
            answers.append(list(done.tokens))
            cached += done.usage.cached_tokens
        return answers, cached, dict(engine.counters())


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return serve()[0]


def test_a_restarted_engine_loads_what_the_last_one_computed(
    tmp_path: Path, expected: list[list[int]]
) -> None:
    settings = {"kv_tier_dir": str(tmp_path), "kv_tier_memory": 16 << 20}
    answers, cached, _ = serve(**settings)
    assert (answers, cached) == (expected, 0)
    answers, cached, counters = serve(**settings)
    assert (answers, cached) == (expected, 3 * 288)
    assert counters["kv_tier_hit_tokens/disk"] == 3 * 288
    assert counters["kv_tier_waits"] == 3

    for path in tmp_path.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    answers, cached, counters = serve(**settings)
    assert answers == expected
    assert cached < 3 * 288
    assert counters["kv_tier_errors/disk"] > 0


def test_a_disk_slower_than_computing_is_not_waited_for(
    tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(kv_tier_dir=str(tmp_path))
    monkeypatch.setattr("ridgeline.engine.scheduler.kv.cache_tiers.UNMEASURED_WAIT_S", 0.1)
    original = ExtentDirectory.read

    def read(self: ExtentDirectory, *args: Any) -> None:
        time.sleep(0.6)
        original(self, *args)

    monkeypatch.setattr(ExtentDirectory, "read", read)
    answers, _, counters = serve(kv_tier_dir=str(tmp_path))
    assert answers == expected
    assert counters["kv_tier_waits"] >= 1


def test_files_may_vanish_while_an_engine_uses_them(
    tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(kv_tier_dir=str(tmp_path))
    original = TieredStorage.load

    def load(self: TieredStorage, keys: Any) -> Any:
        for path in tmp_path.rglob("*.kv"):
            path.unlink()
        return original(self, keys)

    monkeypatch.setattr(TieredStorage, "load", load)
    answers, cached, _ = serve(kv_tier_dir=str(tmp_path))
    assert (answers, cached) == (expected, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_tier_memory": 1 << 20, "enable_prefix_caching": False}, "enable-prefix-caching"),
        ({"kv_tier_size": 1 << 20}, "needs --kv-tier-dir"),
    ],
)
def test_tiers_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Engine.open("demo", **settings)
