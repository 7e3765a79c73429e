"""What the search knows of a server before it measures: its model, its formats, its memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ridgeline.config.improve import OptimizeOptions
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.optimize.cost import MachinePrice, cost_of
from ridgeline.optimize.external.server_rungs import server_rungs
from ridgeline.optimize.ladder import unmet_need
from ridgeline.workflows.load.twin_servers import TwinMark
from ridgeline.workflows.optimize.optimize import prepare_search
from ridgeline.workflows.optimize.restartable_server import (
    model_of_server,
    probe_for,
    server_recipe,
)
from ridgeline.workflows.optimize.server_costs import ServerCosts
from ridgeline.workflows.optimize.server_driver import RestartableServer
from tests.hardware.test_hardware_doctor import MACHINE

TWIN = "ridgeline twin --device l4 vllm serve llama-3.1-8b --port {port} {flags}"


def server_of(command: str) -> RestartableServer:
    return RestartableServer(url="http://127.0.0.1:{port}", restart_cmd=command)


def costs_of(command: str, model: str) -> tuple[ServerCosts, Settings]:
    recipe = server_recipe(server_of(command), Path())
    start = recipe.start_settings(Settings(model=model))
    return ServerCosts(machine=None, recipe=recipe, start=start), start


@pytest.mark.parametrize(
    ("command", "model"),
    [
        ("vllm serve meta-llama/Llama-3.1-8B-Instruct {flags}", "dummy:llama-3.1-8b"),
        ("ridgeline twin --device l4 vllm serve llama-3.1-8b {flags}", "dummy:llama-3.1-8b"),
        ("python -m sglang.launch_server --model-path demo {flags}", "demo"),
        ("env A=1 vllm serve some/unknown-model {flags}", "some/unknown-model"),
        ("./start.sh {flags}", "configured"),
    ],
)
def test_model_is_read_from_the_command_line(command: str, model: str) -> None:
    assert model_of_server(command, None, "configured") == model


def test_named_model_precedes_that_of_the_command_line() -> None:
    assert model_of_server(TWIN, "demo", "configured") == "demo"


def test_peaks_of_a_twin_are_those_of_its_device_in_the_served_dtype() -> None:
    costs, start = costs_of(TWIN, "dummy:llama-3.1-8b")
    assert costs.peaks(start).dtype == "bfloat16"
    assert costs.peaks(start).bytes_s == pytest.approx(300e9)


def test_twins_at_another_speed_have_peaks_and_prices_per_second_of_real_time() -> None:
    usual, start = costs_of(TWIN, "dummy:llama-3.1-8b")
    fast, fast_start = costs_of(TWIN.replace("twin ", "twin --speed 10 "), "dummy:llama-3.1-8b")
    ten, one = fast.peaks(fast_start), usual.peaks(start)
    assert (ten.bytes_s, ten.flops_s) == (10 * one.bytes_s, 10 * one.flops_s)
    assert "times 10" in ten.source and "times" not in one.source
    assert usual.transfer_s(64) == pytest.approx(10 * fast.transfer_s(64))
    recipe = server_recipe(server_of(TWIN.replace("twin ", "twin --speed=4 ")), Path())
    job, _ = prepare_search(Settings(model="dummy:llama-3.1-8b"), OptimizeOptions(), recipe)
    assert job.price.speed == 4
    # Four times the tokens in an hour of measurement are those of four hours of the device.
    real = cost_of(MachinePrice(), 100.0, 300.0)
    assert cost_of(job.price, 400.0, 1200.0) == real


@pytest.mark.parametrize(
    ("devices", "speed"),
    [("1 x l4, modelled", 1.0), ("2 x l4, modelled, 2.5 times as fast", 2.5)],
)
def test_mark_of_a_running_twin_tells_its_device_and_speed(devices: str, speed: float) -> None:
    mark = TwinMark(devices=devices, server=None)
    assert (mark.device, mark.speed) == ("l4", speed)


def test_named_device_gives_peaks_and_memory_to_a_server_that_runs_elsewhere() -> None:
    command = "vllm serve llama-3.1-8b --port {port} {flags}"
    far = msgspec.structs.replace(server_of(command), accelerator="l4")
    recipe = server_recipe(far, Path())
    start = recipe.start_settings(Settings(model="dummy:llama-3.1-8b"))
    costs = ServerCosts(None, recipe, start)
    twin, twin_start = costs_of(TWIN, "dummy:llama-3.1-8b")
    assert costs.peaks(start) == twin.peaks(twin_start)
    assert costs.scheduler(start).pool.num_blocks == twin.scheduler(twin_start).pool.num_blocks
    unnamed = server_recipe(server_of(command), Path())
    assert "--accelerator" in unnamed.assumed_device(has_gpu=False)
    assert recipe.assumed_device(has_gpu=False) == unnamed.assumed_device(has_gpu=True) == ""
    with pytest.raises(BadInput, match="l5"):
        _ = msgspec.structs.replace(recipe, accelerator="l5").device


def test_model_larger_than_this_machine_can_be_searched() -> None:
    command = (
        "ridgeline twin --device h100-sxm:4 vllm serve llama-3.1-70b "
        "--tensor-parallel-size 4 --port {port} {flags}"
    )
    costs, start = costs_of(command, "dummy:llama-3.1-70b")
    assert costs.scheduler(start).pool.num_blocks > 10_000


def test_memory_share_decides_how_many_tokens_the_simulated_cache_holds() -> None:
    costs, start = costs_of(TWIN, "dummy:llama-3.1-8b")
    more = msgspec.structs.replace(
        start, server_flags=(("--gpu-memory-utilization", "0.95"),)
    )  # fmt: skip
    assert costs.scheduler(more).pool.num_blocks > costs.scheduler(start).pool.num_blocks


def test_flags_of_the_server_change_the_predicted_step_times_by_the_model_of_its_device() -> None:
    command = (
        "ridgeline twin --device l4 vllm serve qwen3-0.6b --enforce-eager --port {port} {flags}"
    )
    costs, start = costs_of(command, "dummy:qwen3-0.6b")
    graphs = msgspec.structs.replace(start, server_flags=(("--no-enforce-eager", ""),))
    effect = costs.flag_effect(graphs, start)
    assert effect is not None
    assert effect([(1, 200)], 1) < 0.97  # launches no longer limit a small batch
    assert costs.flag_effect(start, start) is None


def test_drafts_have_no_effect_that_a_model_of_steps_could_know() -> None:
    costs, start = costs_of(TWIN, "dummy:llama-3.1-8b")
    text = '{"method":"ngram","num_speculative_tokens":6}'
    drafts = msgspec.structs.replace(start, server_flags=(("--speculative-config", text),))
    effect = costs.flag_effect(drafts, start)
    assert effect is not None and effect([(1, 200)] * 8, 8) == 1.0


def test_replicas_are_read_from_the_command_line() -> None:
    costs, start = costs_of(TWIN, "dummy:llama-3.1-8b")
    more = msgspec.structs.replace(start, server_flags=(("--data-parallel-size", "4"),))
    assert (costs.replicas(start), costs.replicas(more)) == (1, 4)


def test_defaults_of_a_server_keep_what_it_has_no_default_for() -> None:
    recipe = server_recipe(
        server_of("llama-server -m m --threads 1 --parallel 1 --port {port} {flags}"),
        Path("unused"),
    )
    defaults = recipe.default_settings(Settings(model="demo"))
    assert (defaults.num_threads, defaults.max_num_seqs) == (1, 4)


def test_rungs_of_gpus_are_left_out_only_where_the_server_runs_on_this_cpu() -> None:
    command = "vllm serve llama-3.1-8b --port {port} {flags}"
    here = server_recipe(server_of(command), Path())
    assert here.device_facts(has_gpu=False) == {"server_device": "cpu"}
    assert here.device_facts(has_gpu=True) == {}
    elsewhere = msgspec.structs.replace(server_of(command), url="http://10.0.0.9:{port}")
    assert server_recipe(elsewhere, Path()).device_facts(has_gpu=False) == {}
    named = msgspec.structs.replace(server_of(command), accelerator="l4")
    assert server_recipe(named, Path()).device_facts(has_gpu=False) == {}
    left_out = {
        rung.id
        for rung in server_rungs("vllm")
        if unmet_need(rung, {"server_device": "cpu"}) is not None
    }
    assert {"vllm-memory-share", "vllm-attention-backend"} <= left_out
    assert not left_out & {"vllm-graphs", "vllm-block-size"}


def test_this_machine_is_probed_only_where_the_server_may_run_on_it() -> None:
    said: list[object] = []
    twin = server_recipe(server_of(TWIN), Path())
    assert probe_for(twin, said.append, lambda: pytest.fail("probed")) is None
    plain = server_recipe(server_of("vllm serve m --port {port} {flags}"), Path())
    assert probe_for(plain, said.append, lambda: MACHINE) is MACHINE
    assert len(said) == 1
