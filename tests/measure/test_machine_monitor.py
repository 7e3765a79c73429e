"""Resources that a server used during a run: its processes, and GPUs as reported by NVML."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from ridgeline.cli.commands.measure.bench import run_bench
from ridgeline.config.load import BenchOptions, BenchReport
from ridgeline.measure.monitors import gpu as gpu_module
from ridgeline.measure.monitors.energy import EnergyUse, Rapl, gpu_joules
from ridgeline.measure.monitors.gpu import NoGpus, NvmlGpus, gpu_usages, open_gpus
from ridgeline.measure.monitors.machine_monitor import MachineMonitor, MachineReport
from ridgeline.measure.monitors.process_usage import (
    ProcessReading,
    is_local,
    listening_process,
    process_usage,
    read_tree,
)
from ridgeline.workflows.bench.observed_tables import machine_rows
from ridgeline.workflows.check_machine import check_counters
from ridgeline.workflows.load import server_monitor
from ridgeline.workflows.load.server_monitor import Observed, observe_run
from ridgeline.workflows.targets import RemoteServer
from tests.diagnose.mock_thread import mock_server
from tests.measure.fake_nvml import FakeNvml


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_the_fake_has_the_shape_of_the_real_module():
    import pynvml

    for name, made in inspect.getmembers(FakeNvml, inspect.isfunction):
        if name.startswith("nvml"):
            real = inspect.signature(getattr(pynvml, name))
            assert list(real.parameters) == list(inspect.signature(made).parameters)[1:], name
    assert issubclass(pynvml.NVMLError, Exception)
    assert FakeNvml.NVML_CLOCK_SM == pynvml.NVML_CLOCK_SM
    reasons = {
        "power cap": "SwPowerCap",
        "hardware slowdown": "HwSlowdown",
        "software thermal slowdown": "SwThermalSlowdown",
        "hardware thermal slowdown": "HwThermalSlowdown",
        "power brake": "HwPowerBrakeSlowdown",
    }
    bits = {getattr(pynvml, f"nvmlClocksEventReason{end}"): text for text, end in reasons.items()}
    assert bits == gpu_module.SLOWED_BY


def test_gpu_readings_that_are_missing_are_none(nvml):
    gpus = open_gpus()
    first, old = gpus.read()
    assert (first.name, old.name) == ("NVIDIA H100 80GB HBM3", "Old card")
    assert (first.busy_share, first.memory_busy_share) == (0.8, 0.35)
    assert (first.power_w, first.power_limit_w) == (350.5, 700.0)
    assert first.clock_share == pytest.approx(1410 / 1980)
    assert (first.memory_used_bytes, first.memory_total_bytes) == (20e9, 80e9)
    assert first.slowed_by == ()  # idle is not slow
    assert old.busy_share is None and old.memory_used_bytes == 20e9 and old.slowed_by is None
    nvml.events = 0x04 | 0x40
    assert gpus.read()[0].slowed_by == ("power cap", "hardware thermal slowdown")
    gpus.close()
    assert not nvml.running


def test_older_copies_of_the_module_have_the_older_name(nvml):
    asked = []

    def throttled(handle):
        asked.append(handle)
        return 0x08

    old = {name: getattr(nvml, name) for name in dir(nvml) if "EventReasons" not in name}
    nvml.nvmlInit()
    module = type("Old", (), {**old, "nvmlDeviceGetCurrentClocksThrottleReasons": throttled})
    assert NvmlGpus(module).read()[0].slowed_by == ("hardware slowdown",)
    assert asked == [0, 1]


def test_readings_become_means_and_time_shares(nvml):
    gpus, readings = open_gpus(), []
    for busy, events in ((100, 0x04), (60, 0x04 | 0x20), (20, 0x01), (20, 0x01)):
        nvml.busy, nvml.events = busy, events
        readings.append(gpus.read())
    first, old = gpu_usages(readings)
    assert first.num_readings == 4 and first.busy_share == pytest.approx(0.5)
    assert first.slowed_share == 0.5
    assert first.slowed_by == {"power cap": 0.5, "software thermal slowdown": 0.25}
    assert old.busy_share is None and old.slowed_share is None
    assert gpu_usages([]) == ()
    report = MachineReport(gpus=(first,))
    assert report.facts()["gpu_busy_share"] == pytest.approx(0.5)
    assert report.facts()["gpu_slowed_share"] == 0.5
    assert "gpu_busy_share" not in MachineReport(gpus=(first, old)).facts()
    spare = msgspec.structs.replace(first, busy_share=0.0)  # used by another job, or idle
    assert MachineReport(gpus=(first, spare)).facts() == MachineReport(gpus=(first,)).facts()
    assert MachineReport(gpus=(spare, spare)).facts() == {}  # the server runs on the CPU


@pytest.mark.parametrize("missing", ["module", "driver"])
def test_missing_nvml_is_reported(monkeypatch, nvml, missing):
    if missing == "module":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:

        def absent():
            raise nvml.NVMLError("NVML Shared Library Not Found")

        nvml.nvmlInit = absent
    gpus = open_gpus()
    assert isinstance(gpus, NoGpus) and gpus.why_none.startswith("NVML is not")
    assert gpus.read() == ()
    report = MachineReport(gpus=gpu_usages([gpus.read()]), notes=(gpus.why_none,))
    assert report.facts() == {}
    assert list(machine_rows(report, in_process=True)) == [("not measured", "–", gpus.why_none)]


def test_cards_of_others_are_left_out_and_keep_their_numbers(nvml):
    """A container with one card of two: NVML counts both, and may open one."""

    def open_one(index):
        if index == 0:
            raise nvml.NVMLError("Insufficient Permissions")
        return index

    nvml.nvmlDeviceGetHandleByIndex = open_one
    gpus = open_gpus()
    (old,) = gpus.read()
    assert (old.name, old.number) == ("Old card", 1)
    assert gpus.why_none == "NVML cannot read GPU 0: Insufficient Permissions"
    report = MachineReport(gpus=gpu_usages([gpus.read()]), notes=(gpus.why_none,))
    rows = list(machine_rows(report, in_process=True))
    assert rows[0] == ("GPU 1 busy", "–", "Old card")
    assert rows[-1] == ("not measured", "–", gpus.why_none)


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        ("none", "NVML finds no GPU"),
        ("all", "NVML cannot read GPU 0: Lost; GPU 1: Lost"),
        ("count", "NVML cannot count GPUs: Lost"),
    ],
)
def test_a_driver_without_readable_cards_is_a_reason(nvml, failure, why):
    def lost(*_):
        raise nvml.NVMLError("Lost")

    if failure == "none":
        nvml.nvmlDeviceGetCount = lambda: 0
    elif failure == "all":
        nvml.nvmlDeviceGetHandleByIndex = lost
    else:
        nvml.nvmlDeviceGetCount = lost
    gpus = open_gpus()
    assert gpus.read() == () and gpus.why_none == why
    assert nvml.running is (failure != "count")

    async def main():
        async with MachineMonitor(os.getpid(), gpus, rapl=Rapl(Path("/nowhere"))) as watch:
            await watch.begin()
        return watch.report()

    report = asyncio.run(main())
    assert report.gpus == () and report.notes == (why,) and report.energy.why_no_gpu == why


def test_a_card_that_supports_nothing_is_named_and_nothing_else(nvml):
    def unsupported(*_):
        raise nvml.NVMLError("Not Supported")

    for name in dir(nvml):
        if name.startswith("nvmlDeviceGet") and not name.endswith(("Count", "ByIndex", "Name")):
            setattr(nvml, name, unsupported)
    gpus = open_gpus()
    usages = gpu_usages([gpus.read(), gpus.read()])
    report = MachineReport(gpus=usages, energy=EnergyUse(why_no_cpu="a", why_no_gpu="b"))
    rows = list(machine_rows(report, in_process=True, num_tokens=3))
    assert [row for row in rows if row[0].startswith("GPU")] == [
        ("GPU 0 busy", "–", "NVIDIA H100 80GB HBM3"),
        ("GPU 1 busy", "–", "Old card"),
        ("GPU energy", "–", "b"),
    ]
    assert report.facts() == {}


def test_functions_that_the_module_does_not_have_are_not_supported(nvml):
    """An old nvidia-ml-py with a new driver."""
    known = ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
    old = type("Old", (), {name: getattr(nvml, name) for name in (*known, "NVMLError")})
    nvml.nvmlInit()
    first, _ = NvmlGpus(old).read()
    assert (first.name, first.power_w, first.energy_j) == ("GPU", None, None)


def test_divided_card_is_said_to_be_read_as_a_whole(nvml):
    nvml.divided = True
    gpus = open_gpus()
    report = MachineReport(gpus=gpu_usages([gpus.read()]))
    words = {row[0]: row[2] for row in machine_rows(report, in_process=True)}
    assert "MIG is on" in words["GPU 0 busy"] and "MIG" not in words["GPU 1 busy"]


def test_a_card_that_is_lost_during_the_run_keeps_its_name(nvml):
    gpus, readings = open_gpus(), []
    readings.append(gpus.read())

    def lost(*_):
        raise nvml.NVMLError("GPU is lost")

    for name in dir(nvml):
        if name.startswith("nvmlDeviceGet"):
            setattr(nvml, name, lost)
    readings.append(gpus.read())
    first, _ = gpu_usages(readings)
    assert first.name == "NVIDIA H100 80GB HBM3" and first.power_w == 350.5
    assert gpu_joules(readings, [0.0, 1.0]) is None


def test_doctor_shows_the_counters_of_each_card(nvml):
    nvml.events, nvml.divided = 0x04, True
    (check,) = check_counters()
    assert check.ok and not nvml.running
    assert check.detail == (
        "GPU 0: NVIDIA H100 80GB HBM3, 20 of 80 GB used, 350 of 700 W, clock 71%, slowed down by "
        "power cap, MIG is on: figures of the whole card; "
        "GPU 1: Old card, 20 of 80 GB used, 350 of 700 W, clock 71%"
    )


def test_doctor_finds_no_fault_in_cards_of_others(nvml):
    def open_one(index):
        if index == 0:
            raise nvml.NVMLError("Insufficient Permissions")
        return index

    nvml.nvmlDeviceGetHandleByIndex = open_one
    (check,) = check_counters()
    assert check.ok and "cannot read GPU 0: Insufficient Permissions" in check.detail


@pytest.mark.parametrize("has_card", [False, True])
def test_doctor_says_why_there_are_no_counters_where_there_is_a_card(nvml, monkeypatch, has_card):
    def mismatch():
        raise nvml.NVMLError("Driver/library version mismatch")

    nvml.nvmlInit = mismatch
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia0")] * has_card))
    checks = check_counters()
    assert len(checks) == has_card
    for check in checks:
        assert not check.ok and not check.required
        assert check.detail == "NVML is not available: Driver/library version mismatch"


def test_monitor_releases_nvml_after_the_run(nvml):
    async def main():
        async with MachineMonitor(os.getpid(), open_gpus(), period_s=0.01) as watch:
            await asyncio.sleep(0.1)
        return watch.report()

    report = asyncio.run(main())
    assert not nvml.running
    assert report.process is not None and report.process.rss_bytes > 1e6
    assert report.gpus[0].num_readings >= 3 and report.notes == ()
    text = "\n".join("|".join(row) for row in machine_rows(report, in_process=True))
    for words in (
        "GPU 0 busy|80%",
        "GPU 0 memory|20.0|of 80.0 GB",
        "350",
        "W of 700",
        "GPU 1 busy|–",
    ):
        assert words in text


SPIN = "import time\nend = time.perf_counter() + 20\nwhile time.perf_counter() < end: pass"


def test_child_processes_of_the_server_are_counted():
    """A parent that sleeps and a child that computes: about one core between them."""
    parent = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {SPIN!r}])\n"
    server = subprocess.Popen([sys.executable, "-c", parent + "time.sleep(20)"])
    try:
        deadline = time.monotonic() + 10
        while True:
            first = read_tree(server.pid, time.monotonic())
            assert first is not None and time.monotonic() < deadline
            if first.num_processes == 2 and first.cpu_s > 0.1:
                break
            time.sleep(0.02)
        time.sleep(0.5)
        second = read_tree(server.pid, time.monotonic())
    finally:
        for line in subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(server.pid)], capture_output=True, text=True
        ).stdout.split():
            os.kill(int(line), 9)
        server.kill()
        server.wait()
    used = process_usage([first, second])
    assert used is not None and used.num_processes == 2
    assert 0.05 < used.cpu_cores < 1.3  # a busy machine gives it less
    assert read_tree(server.pid, 0.0) is None


def test_use_is_growth_over_time():
    readings = ((0, 10, 4, 2), (1, 11, 8, 3), (2, 10.5, 6, 2), (4, 13.5, 6, 2))
    rows = [ProcessReading(*row) for row in readings]
    used = process_usage(rows)
    assert used.cpu_cores == pytest.approx(
        (1 + 0 + 3) / 4
    )  # a process that ended takes its CPU along
    assert (used.rss_bytes, used.rss_peak_bytes, used.num_processes) == (6, 8, 3)
    assert process_usage(rows[:1]) is None and process_usage([]) is None
    assert used.taken_share is None  # not reported


def test_cpu_taken_is_a_share_of_the_cpu_demand():
    readings = ((0, 10, 4, 2, 1.0, 7.0), (1, 11, 4, 2, 1.5, 7.0), (2, 12, 4, 2, 1.25, 7.5))
    used = process_usage([ProcessReading(*row) for row in readings])
    assert used.taken_share == pytest.approx((0.5 + 0.5) / (2 + 0.5 + 0.5))
    half = process_usage(
        [ProcessReading(*row[:5]) for row in readings]
    )  # no virtual machine: no steal
    assert half.taken_share == pytest.approx(0.5 / 2.5)
    facts = MachineReport(process=used).facts()
    assert facts["cpu_taken_share"] == used.taken_share


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux tells it")
def test_processes_that_share_a_core_wait():
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    pair = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    try:
        time.sleep(0.3)
        first = read_tree(pair[0].pid, time.monotonic())
        time.sleep(0.6)
        second = read_tree(pair[0].pid, time.monotonic())
    finally:
        for each in pair:
            each.kill()
            each.wait()
    assert second.waited_s - first.waited_s > 0.15  # about half of the time


def test_owner_of_a_port_is_found():
    with socket.socket() as heard:
        heard.bind(("127.0.0.1", 0))
        heard.listen()
        assert listening_process(heard.getsockname()[1]) == os.getpid()
        free = heard.getsockname()[1]
    assert listening_process(free) is None


def test_local_addresses_are_recognised():
    assert is_local("127.0.0.1") and is_local("localhost") and is_local("::1")
    assert not is_local("192.0.2.7") and not is_local("no such host.invalid")


def test_remote_server_has_no_machine_metrics():
    watch = server_monitor.watch_machine("http://192.0.2.7:8000/v1")
    assert watch.report() == MachineReport(notes=(server_monitor.NOT_LOCAL,))


def test_bench_reports_machine_metrics_in_every_output(tmp_path, nvml):
    """Console, JSON and page; the server is a thread here, so its process is this one."""
    console = Console(record=True, width=160)
    outputs = BenchReport(output_json=tmp_path / "r.json", html=tmp_path / "r.html")
    options = BenchOptions(workload="synthetic:input=8,output=4", num_prompts=6, num_warmups=0)
    with mock_server(ttft_s=0.01, itl_s=0.002) as url:
        assert run_bench(options, RemoteServer(url=url), outputs, console) == 0
    text = console.export_text()
    assert "machine" in text and "GPU 0 busy" in text and "CPU cores" in text
    assert "server metrics" in text
    page = outputs.html.read_text()
    assert "Machine" in page and "NVIDIA H100 80GB HBM3" in page
    assert '"machine":{"process":{"cpu_cores":' in outputs.output_json.read_text()


def test_monitor_does_not_hide_the_error_of_a_run(nvml):
    async def broken(begin):
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        asyncio.run(observe_run(broken, None))
    assert not nvml.running and Observed().server is None
