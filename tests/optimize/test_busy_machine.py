"""Other work on the machine: disturbed rounds are void, and a busy machine is never a verdict."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from ridgeline.config.settings import Settings
from ridgeline.measure.client.load_client import OnStart
from ridgeline.measure.monitors.machine_load import (
    LoadMeter,
    SystemReading,
    machine_load,
    read_system,
)
from ridgeline.measure.workload import parse_workload
from ridgeline.optimize.comparison.objective import credit_held_loads, judge_run
from ridgeline.optimize.comparison.paired_comparison import ComparisonSide, compare_in_rounds
from ridgeline.optimize.environment import Load
from ridgeline.optimize.external.server_deployment import (
    ModelAndKey,
    ServerAddress,
    ServerDeployment,
    ServerPrompts,
    server_info,
)
from ridgeline.optimize.output.headline import headline
from ridgeline.records import MachineLoad, RunTrace, Slo
from ridgeline.workflows.load.server_monitor import observe_run
from tests.diagnose.mock_thread import mock_server
from tests.optimize.simulated_servers import Fake, Physics, Quirks, SimulatedDeployment, simulate
from tests.optimize.test_paired_comparison import runner
from tests.optimize.test_search import only, search_ladder

SLO = Slo.parse("ttft:500 tpot:50")


async def test_a_machine_that_stays_busy_is_named_and_no_rung_is_called_worse() -> None:
    fake = Fake(busy=lambda now_s: 0.0 if now_s < 25 else 0.4)
    result = await search_ladder(fake, rungs=only("continuous-batching", "prefix-caching"))
    assert {trial.verdict for trial in result.trials} <= {"inconclusive", "cut short"}
    busy = [trial for trial in result.trials if trial.busy_share is not None]
    assert busy[0].reason == "the machine was busy (40% of the CPU taken)"
    assert headline(result).startswith("Inconclusive: the machine was busy (40% of the CPU taken)")
    assert result.final.settings == result.baseline.settings


async def test_disturbed_rounds_are_repeated() -> None:
    """Every fourth second is disturbed: the gain is found all the same."""
    fake = Fake(busy=lambda now_s: 0.6 if int(now_s) % 16 == 0 else 0.0)
    result = await search_ladder(fake, rungs=only("continuous-batching"))
    assert [trial.verdict for trial in result.trials][:1] == ["kept"]
    assert result.total is not None and result.total.low > 2


async def test_candidate_that_met_the_slo_in_no_round_is_not_kept() -> None:
    """It starts far above its knee, and its incumbent far below: the old floor called it faster."""
    fake = Fake()
    slow = SimulatedDeployment(fake, Settings(max_num_seqs=16, seed=1), Quirks(speed=0.5))
    mine = SimulatedDeployment(fake, Settings(max_num_seqs=16), Quirks())
    compared = await compare_in_rounds(
        runner(fake, 0),
        ComparisonSide("a", mine, 20.0, settled=True),
        ComparisonSide("b", slow, 300.0, settled=True),
        max_rounds=3,
    )
    assert not any(judged.holds for judged in compared.after)
    assert compared.outcome != "improved"
    assert all(judged.score < 100 for judged in compared.after)


async def test_gain_beyond_the_next_step_counts_although_the_incumbent_rises() -> None:
    fake = Fake()
    mine = SimulatedDeployment(fake, Settings(max_num_seqs=4), Quirks())
    fast = SimulatedDeployment(fake, Settings(max_num_seqs=64, seed=1), Quirks())
    compared = await compare_in_rounds(
        runner(fake, 0),
        ComparisonSide("a", mine, 5.0, settled=True),
        ComparisonSide("b", fast, 12.0, settled=True),
        max_rounds=3,
    )
    assert all(judged.holds for judged in compared.before)
    assert compared.ratio is not None and compared.ratio.low > 1.2
    assert compared.outcome == "improved"


def test_missed_run_is_credited_with_the_best_load_held_below() -> None:
    def judged(rate: float, seed: int = 1):  # type: ignore[no-untyped-def]
        load = Load(rate=rate, seed=seed, window_s=4.0, grace_s=2.0)
        run = simulate(Physics(), Settings(max_num_seqs=16), load, 1.0)
        return judge_run(run, load, SLO, "goodput")

    held, missed = judged(10.0), judged(300.0)
    assert held.holds and not missed.holds
    credited = credit_held_loads((missed,), (held,))[0]
    assert credited.score == pytest.approx(max(held.score, missed.score))
    assert credit_held_loads((missed,))[0].score == missed.score < 300 * 0.5
    unlucky = msgspec.structs.replace(missed, rate=8.0, score=2.0)
    assert credit_held_loads((unlucky,), (held,))[0].score == pytest.approx(min(8.0, held.score))


def test_load_by_others_is_the_systems_cpu_time_without_the_measured_processes() -> None:
    def reading(at_s: float, busy_s: float, own_s: float, waited_s: float) -> SystemReading:
        return SystemReading(
            at_s=at_s,
            busy_s=busy_s,
            stolen_s=0.1 * at_s,
            io_wait_s=0.0,
            own_s=own_s,
            waited_s=waited_s,
            num_cpus=2,
        )

    load = machine_load(reading(0.0, 5.0, 1.0, 0.0), reading(10.0, 17.0, 7.0, 2.0))
    assert load is not None
    assert load.others_share == pytest.approx(6 / 20)
    assert load.stolen_share == pytest.approx(1 / 20)
    assert load.waited_share == pytest.approx(2 / 8)
    assert load.taken_share == pytest.approx(1 / 20 + 2 / 8)
    assert load.is_busy


def test_cores_that_were_not_missed_were_not_taken() -> None:
    assert not MachineLoad(others_share=0.6, waited_share=0.02).is_busy
    assert not MachineLoad(others_share=0.02, waited_share=0.5).is_busy  # its own threads
    assert MachineLoad(others_share=0.4).is_busy


def test_meter_reads_this_machine() -> None:
    before = read_system(())
    sum(i * i for i in range(4_000_000))
    load = machine_load(before, read_system(()))
    assert load is None or 0 <= load.taken_share <= 1


@pytest.mark.skipif(not Path("/proc").exists(), reason="CPU time of others is read from Linux")
def test_meter_sees_a_process_that_is_not_measured() -> None:
    before = read_system(())
    hog = ["sh", "-c", "timeout 3 sh -c 'while :; do :; done' >/dev/null 2>&1 &"]
    subprocess.run(hog, check=True)  # its shell has ended: it is no child of this process
    time.sleep(1.0)
    load = machine_load(before, read_system(()))
    assert load is not None
    assert load.others_share > 0.3 / len(os.sched_getaffinity(0))


async def test_runs_over_http_carry_the_load_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = MachineLoad(others_share=0.5)
    monkeypatch.setattr(LoadMeter, "read", lambda _: taken)
    workload = parse_workload("synthetic:input=8,output=2")
    with mock_server(ttft_s=0.001, itl_s=0.001) as url:
        deployment = ServerDeployment(
            lambda: ServerAddress(url, 1),
            ModelAndKey("steady"),
            ServerPrompts(workload, workload),
            server_info(Settings(model="demo"), {}, "steady"),
            {},
        )
        load = Load(rate=100.0, seed=1, window_s=0.05, grace_s=1.0)
        run = await deployment.run(load)
        await asyncio.sleep(0.05)  # the client's connections end
    assert judge_run(run, load, SLO, "goodput").is_busy
    observed, _ = await observe_run(partial(started, run), None)
    assert observed.machine_load == taken


async def started(run: RunTrace, begin: OnStart) -> RunTrace:
    await begin()
    return msgspec.structs.replace(run, machine_load=None)


async def test_runs_on_a_shared_machine_count_although_it_is_busy() -> None:
    fake = Fake(busy=lambda now_s: 0.4)
    result = await search_ladder(fake, rungs=only("continuous-batching"), shared_machine=True)
    assert [trial.verdict for trial in result.trials][:1] == ["kept"]
    assert result.busy_share is None
    assert "although other work took the CPU" in result.provenance.protocol
