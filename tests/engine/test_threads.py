"""Thread counts: within the CPU quota, measured on request, and set before each step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch

from ridgeline.config.settings import Settings
from ridgeline.engine.config import resolve
from ridgeline.engine.engine import Engine
from ridgeline.engine.execution.threads import FEW_ROWS, StepThreads, ThreadRates, plan_threads
from ridgeline.hardware.measure import enough_threads
from ridgeline.hardware.system import Cores
from ridgeline.records import Sampling

MACHINE = ThreadRates(
    {1: 12e9, 2: 20e9, 4: 29.5e9, 8: 30e9}, {1: 50e9, 2: 100e9, 4: 200e9, 8: 390e9}
)


def cores(quota: float | None = None) -> Cores:
    return Cores(logical=16, physical=8, affinity=16, quota=quota)


def measured(most: int) -> ThreadRates:
    return ThreadRates(*({n: rate for n, rate in rates.items() if n <= most} for rates in MACHINE))


def not_asked(most: int) -> ThreadRates:
    raise AssertionError("no measurement was requested")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_fewest_threads_that_reach_the_best_time() -> None:
    assert enough_threads(MACHINE.read) == 4
    assert enough_threads(MACHINE.multiply) == 8


def test_default_is_all_usable_cores_without_a_measurement() -> None:
    plan = plan_threads(Settings(model="demo"), cores(quota=3.5), not_asked)
    assert plan[:2] == (3, 3) and "3.5 cores usable" in plan.why


def test_auto_measures_within_the_quota() -> None:
    auto = Settings(model="demo", thread_plan="auto")
    assert plan_threads(auto, cores(), measured)[:2] == (8, 4)
    assert plan_threads(auto, cores(quota=2.0), measured)[:2] == (2, 2)
    assert plan_threads(auto, cores(quota=0.5), measured)[:2] == (1, 1)
    assert "GB/s" in plan_threads(auto, cores(), measured).why_decode


def test_requested_number_is_used_and_too_many_are_reported() -> None:
    asked = Settings(model="demo", num_threads=6, num_threads_decode=2)
    assert plan_threads(asked, cores(), not_asked)[:2] == (6, 2)
    mixed = Settings(model="demo", num_threads_decode=1, thread_plan="auto")
    assert plan_threads(mixed, cores(), measured)[:2] == (8, 1)
    crowd = plan_threads(Settings(model="demo", num_threads=6), cores(quota=4.0), not_asked)
    assert crowd.num_threads == 6 and "more than the 4 usable" in crowd.why


def test_small_steps_use_the_decode_threads() -> None:
    threads = StepThreads(3, 2)
    for num_rows, count in ((1, 2), (FEW_ROWS, 2), (FEW_ROWS + 1, 3), (512, 3), (4, 2)):
        threads.begin(num_rows)
        assert torch.get_num_threads() == count


def test_thread_count_set_by_another_engine_is_noticed() -> None:
    one, other = StepThreads(3, 2), StepThreads(1, 1)
    for threads, num_rows, count in ((one, 512, 3), (other, 512, 1), (one, 512, 3), (one, 1, 2)):
        threads.begin(num_rows)
        assert torch.get_num_threads() == count


@pytest.mark.slow
def test_this_machine_can_be_measured() -> None:
    found = resolve(Settings(model="demo", thread_plan="auto", max_model_len=64))
    plain = resolve(Settings(model="demo", max_model_len=64))
    assert 1 <= found.num_threads_decode <= plain.num_threads
    assert 1 <= found.num_threads <= plain.num_threads
    assert "measured" in found.derivations["num_threads_decode"]


def test_two_engines_on_half_the_cores_each_start_no_extra_threads() -> None:
    settings = {"kv_cache_memory_bytes": 16 << 20, "max_model_len": 256}
    asked = Sampling(max_tokens=8, temperature=0)
    tokens = list(range(100, 200))  # a text would start the tokenizer's own threads
    first = Engine.open("demo", num_threads=2, num_threads_decode=1, **settings)
    second = Engine.open("demo", num_threads=1, **settings)
    with first, second:
        before = _num_threads()
        works = [
            Thread(target=engine.generate, args=([tokens], asked)) for engine in (first, second)
        ]
        for work in works:
            work.start()
        for work in works:
            work.join()
        # With two threads, one is the engine's and one is OpenMP's; with one there is no other.
        ends_s = time.monotonic() + 5.0  # a joined thread may still be exiting
        while _num_threads() > before + 1 and time.monotonic() < ends_s:
            time.sleep(0.01)
        assert _num_threads() <= before + 1


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))
