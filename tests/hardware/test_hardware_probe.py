"""The native probes, the record of this machine, and its cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from ridgeline import _native
from ridgeline.hardware import measure
from ridgeline.hardware import probe as probe_module
from ridgeline.hardware.machine import CpuCache, Machine
from ridgeline.hardware.probe import probe
from ridgeline.paths import default_cache_dir

MIB = 1024**2


@pytest.fixture(scope="module")
def machine(tmp_path_factory: Any) -> Machine:
    """One real probe for the whole file."""
    return probe(cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
def test_a_real_probe_is_quick_and_plausible(machine: Machine) -> None:
    assert machine.took_s < (60 if machine.disturbed else 10)
    assert machine.num_threads >= 1
    assert set(machine.read_bandwidth_bytes_s) == set(measure.thread_counts(machine.num_threads))
    assert all(1e8 < rate < 1e13 for rate in machine.read_bandwidth_bytes_s.values())
    assert all(1e8 < rate < 1e14 for rate in machine.cache_bandwidth_bytes_s.values())
    assert 1e9 < machine.multiply_flops["float32"] < 1e14
    assert {"float32", "bfloat16"} <= machine.gemm_flops.keys()
    assert "float32" in machine.native_dtypes
    assert 0 < machine.cpu_share <= 1


@pytest.mark.slow
def test_the_record_survives_json(machine: Machine) -> None:
    assert msgspec.json.decode(msgspec.json.encode(machine), type=Machine) == machine


def test_native_probes_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="num_threads"):
        _native.read_rates(MIB, 0, 1, 0.001)
    with pytest.raises(ValueError, match="repetitions"):
        _native.read_rates(MIB, 1, 0, 0.001)
    with pytest.raises(ValueError, match="min_s"):
        _native.multiply_rates("float32", 1, 1, float("nan"))
    with pytest.raises(ValueError, match="smaller than one stride"):
        _native.read_rates(100, 1, 1, 0.001)
    with pytest.raises(ValueError, match="float7"):
        _native.multiply_rates("float7", 1, 1, 0.001)
    with pytest.raises(TypeError):
        _native.read_rates(-1, 1, 1, 0.001)


def test_native_probes_give_one_rate_per_repetition() -> None:
    for rates in (
        _native.read_rates(MIB, 2, 4, 0.001),
        *(_native.multiply_rates(kind, 2, 4, 0.001) for kind in _native.multiply_kinds()),
    ):
        assert len(rates) == 4
        assert all(rate > 0 and 0 <= share <= 1 for rate, share in rates)


def test_best_of_medians_shrugs_off_one_bad_repetition() -> None:
    groups = iter(
        [[(10.0, 1.0), (1.0, 0.1), (12.0, 0.9)], [(5.0, 0.5)] * 3, [(99.0, 1.0), (2.0, 0.2)]]
    )
    assert measure.best_of_medians(lambda: next(groups)) == measure.MeasuredRate(50.5, 0.6)


def test_buffer_is_larger_than_the_caches_but_not_than_memory() -> None:
    def l3(mib: int) -> tuple[CpuCache, ...]:
        return (CpuCache(level=3, size_bytes=mib * MIB, instances=1),)

    assert measure.memory_buffer_bytes(l3(32), 64 * 1024 * MIB) == 256 * MIB
    assert measure.memory_buffer_bytes(l3(128), 64 * 1024 * MIB) == 512 * MIB
    assert measure.memory_buffer_bytes(l3(1024), 64 * 1024 * MIB) == 1024 * MIB
    assert measure.memory_buffer_bytes(l3(32), 1024 * MIB) == 128 * MIB


def test_thread_counts() -> None:
    assert [measure.thread_counts(n) for n in (1, 2, 3, 8, 12)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 12],
    ]


def test_bandwidth_by_working_set(machine: Machine) -> None:
    sizes = {1 * MIB: 100.0, 4 * MIB: 80.0, 64 * MIB: 20.0}
    made = msgspec.structs.replace(
        machine, cache_bandwidth_bytes_s=sizes, read_bandwidth_bytes_s={1: 12.0, 2: 18.0}
    )
    assert made.bandwidth(1000) == 100.0
    assert made.bandwidth(2 * MIB) == pytest.approx(90.0)
    assert made.bandwidth(16 * MIB) == pytest.approx(50.0)
    assert made.bandwidth(1e12) == made.best_bandwidth_bytes_s == 18.0
    assert made.peak_flops("float64") is None
    rates = {"multiply_flops": {"float32": 5.0}, "gemm_flops": {"float32": 4.0, "int8": 9.0}}
    made = msgspec.structs.replace(machine, **rates)
    assert (made.peak_flops("float32"), made.peak_flops("int8")) == (5.0, 9.0)


class Counter:
    """Stands in for measuring: counts how often it is asked."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.times = machine, 0

    def __call__(self, clock: Any) -> Machine:
        self.times += 1
        return msgspec.structs.replace(self.machine, probed_unix_s=clock())


@pytest.fixture
def counter(machine: Machine, monkeypatch: Any) -> Counter:
    quiet = msgspec.structs.replace(machine, cpu_share=1.0)
    made = Counter(quiet)
    monkeypatch.setattr(probe_module, "measure_machine", made)
    return made


def test_a_fresh_record_is_used_and_an_old_one_is_not(counter: Counter, tmp_path: Path) -> None:
    for now_s, times in ((1000.0, 1), (1050.0, 1), (1101.0, 2), (1050.0, 3)):  # clock set back
        probe(max_age_s=100, cache_dir=tmp_path, clock=lambda now_s=now_s: now_s)
        assert counter.times == times
    probe(max_age_s=100, cache_dir=tmp_path, clock=lambda: 1050.0, refresh=True)
    assert counter.times == 4


def test_available_memory_is_of_now(counter: Counter, tmp_path: Path, monkeypatch: Any) -> None:
    probe(cache_dir=tmp_path, clock=lambda: 1.0)
    now = probe_module.system.SystemMemory(
        total_bytes=probe_module.system.memory().total_bytes, available_bytes=12345
    )
    monkeypatch.setattr(probe_module.system, "memory", lambda: now)
    again = probe(cache_dir=tmp_path, clock=lambda: 2.0)
    assert (counter.times, again.memory_available_bytes) == (1, 12345)


def test_a_disturbed_record_expires_early(counter: Counter, tmp_path: Path) -> None:
    counter.machine = msgspec.structs.replace(counter.machine, cpu_share=0.5)
    for now_s in (0.0, 500.0, 700.0):
        probe(cache_dir=tmp_path, clock=lambda now_s=now_s: now_s)
    assert counter.times == 2


def test_a_record_of_another_machine_is_not_used(
    counter: Counter, tmp_path: Path, monkeypatch: Any
) -> None:
    probe(cache_dir=tmp_path, clock=lambda: 1.0)
    monkeypatch.setattr(probe_module.ridgeline, "__version__", "99.0")
    probe(cache_dir=tmp_path, clock=lambda: 2.0)
    assert counter.times == 2


@pytest.mark.parametrize("text", ["", "{", '{"cpu_model": 1}'])
def test_a_damaged_record_is_measured_again(text: str, counter: Counter, tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(text)
    probe(cache_dir=tmp_path)
    assert counter.times == 1
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]


def test_a_cache_that_cannot_be_written_only_costs_time(counter: Counter, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for times in (1, 2):
        probe(cache_dir=tmp_path / "file" / "below")
        assert counter.times == times


def test_the_cache_follows_xdg(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.delenv("RIDGELINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "ridgeline"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says: ignore
    assert default_cache_dir() == Path.home() / ".cache" / "ridgeline"
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "elsewhere"))
    assert default_cache_dir() == tmp_path / "elsewhere"


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: FakeEvent) -> float:
        return 2.0  # milliseconds


def fake_torch(*, full: bool) -> Any:
    """A torch with one GPU: every piece of work takes 2 ms, or there is no memory for any."""

    def allocate(*_: int, device: str) -> Any:
        if full:
            raise RuntimeError("CUDA out of memory")
        return MagicMock(numel=lambda: 2**28)

    cuda = MagicMock(Event=FakeEvent, device_count=lambda: 1)
    cuda.get_device_properties.return_value = SimpleNamespace(
        name="G", total_memory=2**36, major=9, minor=0
    )
    return MagicMock(cuda=cuda, zeros=allocate, randn=allocate)


def test_gpus_are_measured_by_their_own_clock(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(full=False))
    (gpu,) = measure.gpus()
    assert (gpu.name, gpu.memory_bytes, gpu.capability) == ("G", 2**36, "9.0")
    assert gpu.read_bandwidth_bytes_s == pytest.approx(2**30 / 0.002)
    assert gpu.gemm_flops["bfloat16"] == pytest.approx(2 * 4096**3 / 0.002)


def test_a_full_gpu_is_listed_unmeasured(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(full=True))
    (gpu,) = measure.gpus()
    assert (gpu.read_bandwidth_bytes_s, gpu.gemm_flops) == (None, {})


@pytest.mark.parametrize("kind", ["int4", "int16", "int8"])
def test_the_peak_of_bytes_is_measured_as_the_kernels_multiply(kind: str) -> None:
    """With the dot product of bytes where the kernels have it, else the ceiling were too low."""
    best = _native.linear_isas().split(",")[0]
    assert _native.multiply_isa(kind) == ("" if best == "portable" else best)
    assert _native.multiply_isa("float7") == ""


def test_threads_that_take_turns_on_one_core_had_half_of_it() -> None:
    """The rate of two such threads is one core's, so that a full share would make it the peak."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        rates = _native.multiply_rates("float32", 2, 6, 0.01)
    finally:
        os.sched_setaffinity(0, before)
    assert all(share < 0.75 for _, share in rates), rates
