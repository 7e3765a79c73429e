"""Computing time split by GPU counters into host delays and clock throttling."""

from __future__ import annotations

import msgspec
import pytest

from ridgeline.diagnose import attribute_server_latency, facts_of, findings, split_gpu_losses
from ridgeline.diagnose.losses.gpu_losses import in_flight_share
from ridgeline.measure.monitors.gpu import GpuUsage
from ridgeline.measure.monitors.machine_monitor import MachineReport
from ridgeline.records.trace import TWIN_OF
from ridgeline.workflows.diagnose.diagnose_run import machine_facts
from tests.diagnose.faults import LOADS, SLO, Engine
from tests.diagnose.faults import run as run_engine
from tests.diagnose.test_server_losses import as_server

HEALTHY = {"gpu_busy_share": 0.97, "gpu_clock_share": 0.99, "gpu_slowed_share": 0.0}


@pytest.fixture(scope="module")
def seen():
    record, metrics = as_server(Engine(), LOADS[0])
    return record, metrics


def named(seen, counters):
    record, metrics = seen
    found = split_gpu_losses(attribute_server_latency(record, metrics), record, counters)
    ranked = findings(found, {**facts_of(record, SLO), **counters}, "vllm")
    return found, {each.cause: each for each in ranked}


def test_busy_gpu_at_full_clock_is_no_finding(seen):
    assert named(seen, HEALTHY)[1] == {}


def test_idle_gpu_is_attributed_to_the_host(seen):
    counters = {**HEALTHY, "gpu_busy_share": 0.5 * in_flight_share(seen[0])}
    found, ranked = named(seen, counters)
    assert list(ranked) == ["gpu-waits-for-the-host"]
    assert found.shares["host"].mid == pytest.approx(
        found.shares["decode"].mid + found.shares["prefill"].mid
    )
    assert "GPU is idle" in ranked["gpu-waits-for-the-host"].sentence
    assert ranked["gpu-waits-for-the-host"].flag.startswith("--async-scheduling")


def test_throttled_clock_is_attributed_to_the_machine(seen):
    counters = {**HEALTHY, "gpu_clock_share": 0.7, "gpu_slowed_share": 0.9}
    found, ranked = named(seen, counters)
    assert list(ranked) == ["gpu-slowed-down"]
    computing = sum(
        attribute_server_latency(*seen).shares[name].mid for name in ("prefill", "decode")
    )
    assert found.shares["slow"].mid == pytest.approx(0.27 * computing, rel=0.01)
    assert "70%" in ranked["gpu-slowed-down"].sentence


def test_low_clock_without_throttling_is_no_finding(seen):
    assert named(seen, {**HEALTHY, "gpu_clock_share": 0.5})[1] == {}


def test_split_losses_add_up_and_missing_counters_change_nothing(seen):
    record, metrics = seen
    before = attribute_server_latency(record, metrics)
    after = split_gpu_losses(
        before, record, {"gpu_busy_share": 0.3, "gpu_slowed_share": 1.0, "gpu_clock_share": 0.6}
    )
    total = [sum(share.mid for share in found.shares.values()) for found in (before, after)]
    assert total[0] == pytest.approx(total[1])
    assert split_gpu_losses(before, record, {}) == before


@pytest.mark.parametrize(
    ("device", "counts"),
    [("cuda:0", True), ("elsewhere", True), ("cpu", False), (f"{TWIN_OF}1 x h100-sxm", False)],
)
def test_gpus_of_other_programs_are_not_those_of_a_server_on_the_cpu(device, counts):
    record, _ = run_engine(Engine(), LOADS[0])
    run = msgspec.structs.replace(record, info=msgspec.structs.replace(record.info, device=device))
    machine = MachineReport(gpus=(GpuUsage(name="H200", num_readings=2, busy_share=0.5),))
    assert machine_facts(machine, run) == ({"gpu_busy_share": 0.5} if counts else {})


def test_in_flight_share():
    record, _ = as_server(Engine(), LOADS[0])
    first = record.requests[0]
    spans = ((0.0, 2.0), (1.0, 3.0), (6.0, 8.0))
    requests = tuple(
        msgspec.structs.replace(
            first, sent_s=begin_s, token_s=(begin_s, end_s), token_counts=(1, 1)
        )
        for begin_s, end_s in spans
    )
    run = msgspec.structs.replace(record, requests=requests, duration_s=10.0)
    assert in_flight_share(run) == pytest.approx(0.5)
