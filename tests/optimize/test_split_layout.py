"""Prefill and decode apart: read from a command, and its price on the simulator."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ridgeline.config.settings import Settings
from ridgeline.engine.scheduler import BlockPool, PrefixCache, Scheduler, SchedulerLimits
from ridgeline.engine.scheduler.batching import make_policy
from ridgeline.measure.metrics.latency import tpot_s
from ridgeline.optimize.environment import Load
from ridgeline.optimize.external.split_layout import SplitLayout, read_split
from ridgeline.optimize.ladder import candidates_of
from ridgeline.plan.simulate.single import Arrival, simulate
from ridgeline.records import RequestTrace
from ridgeline.workflows.optimize.restartable_server import server_recipe
from ridgeline.workflows.optimize.server_costs import ServerCosts
from ridgeline.workflows.optimize.server_driver import RestartableServer
from ridgeline.workflows.optimize.split_simulation import Split, simulate_split

VLLM = """#!/bin/sh
# one kv_role: kv_producer and one "kv_role": "kv_consumer" in a comment
port=$1; shift
vllm serve m --kv-transfer-config '{"kv_connector":"P2p","kv_role":"kv_producer"}' "$@" &
vllm serve m --kv-transfer-config '{"kv_connector":"P2p","kv_role":"kv_consumer"}' "$@" &
vllm serve m --kv-transfer-config '{"kv_connector":"P2p","kv_role":"kv_consumer"}' "$@" &
exec router --port $port
"""


def test_layout_is_read_from_the_script_that_a_command_runs(tmp_path: Path) -> None:
    script = tmp_path / "split.sh"
    script.write_text(VLLM)
    assert read_split(f"sh {script} {{port}} {{flags}}") == SplitLayout(1, 2)
    inline = "sh -c 'a --disaggregation-mode prefill & b --disaggregation-mode=decode'"
    assert read_split(inline) == SplitLayout(1, 1)
    assert read_split("sh missing.sh {port} {flags}") is None
    assert read_split("""vllm serve m --kv-transfer-config '{"kv_role":"kv_both"}'""") is None


def scheduler() -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=8, max_num_batched_tokens=512, max_model_len=8192, chunked_prefill=True
    )
    pool = BlockPool(4_000, 16)
    return Scheduler(limits, make_policy("continuous"), pool, PrefixCache(pool))


def step_s(shapes: object, num_sampled: int) -> float:
    return 0.004 + 1e-4 * sum(new for new, _ in shapes)  # type: ignore[attr-defined]


def run(transfer_s: float, arrivals: list[Arrival]) -> tuple[RequestTrace, ...]:
    load = Load(rate=1.0, seed=0, window_s=30.0, grace_s=30.0)
    split = Split(layout=SplitLayout(1, 1), transfer_s=lambda tokens: transfer_s * tokens)
    return simulate_split(split, (scheduler, scheduler), step_s, arrivals, load).requests


def test_the_answer_waits_for_keys_and_values_to_travel() -> None:
    arrivals = [Arrival(at_s=0.0, prompt=tuple(range(1000)), num_output=20)]
    [near], [far] = run(0.0, arrivals), run(1e-3, arrivals)
    assert far.finished_s - near.finished_s == pytest.approx(1.0, rel=0.01)
    assert len(far.token_s) == 20 and far.error is None


def test_prompts_no_longer_delay_decodes_and_the_price_is_the_second_server() -> None:
    arrivals = [
        Arrival(at_s=0.3 * i, prompt=(i,) * 2000 if i % 2 else (i,) * 20, num_output=100)
        for i in range(40)
    ]
    together = simulate(scheduler(), arrivals, step_s, end_s=60.0).requests
    apart = run(1e-6, arrivals)
    slowest = [max(t for t in map(tpot_s, rows) if t is not None) for rows in (together, apart)]
    assert slowest[1] < 0.8 * slowest[0]


def test_costs_of_a_split_are_those_of_its_server_and_its_link(tmp_path: Path) -> None:
    script = tmp_path / "split.sh"
    script.write_text(VLLM)
    command = "ridgeline twin --device h100-sxm vllm serve llama-3.1-8b --port {port} {flags}"
    recipe = server_recipe(
        RestartableServer(
            url="http://127.0.0.1:{port}",
            restart_cmd=command,
            candidate_commands=(f"sh {script} {{port}} {{flags}}",),
        ),
        tmp_path,
    )
    start = recipe.start_settings(Settings(model="dummy:llama-3.1-8b"))
    costs = ServerCosts(None, recipe, start)
    [option] = candidates_of(recipe.candidate_rungs[0], start, {})
    more = msgspec.structs.replace(option.settings, max_num_seqs=64)
    assert costs.split(start) is None and costs.split(more) == SplitLayout(1, 2)
    line = costs.line(more)
    assert line is not None and line.max_num_seqs == 64
    assert costs.transfer_s(1000) == pytest.approx(1000 * 131072 / 50e9)
