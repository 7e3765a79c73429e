"""Drafters that the user names: their flags, what twins make of them, and the search's verdict."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import msgspec
import pytest

from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput, DoesNotFit
from ridgeline.optimize.cost import MachinePrice
from ridgeline.optimize.external.drafter_rungs import (
    drafter_flags,
    drafter_rungs,
    drafter_table,
    parse_drafter,
)
from ridgeline.optimize.job import OptimizeJob
from ridgeline.optimize.ladder import candidates_of
from ridgeline.optimize.result import LadderResult
from ridgeline.optimize.search import optimize
from ridgeline.optimize.server_settings import FLAGS
from ridgeline.records import Slo
from ridgeline.twin.build import plan_twin, step_times_of
from ridgeline.twin.config import TwinConfig
from ridgeline.twin.servers.behaviour import TwinRun, twin_of
from ridgeline.twin.servers.command_line import read_command
from ridgeline.workflows.optimize.restartable_server import server_recipe
from ridgeline.workflows.optimize.server_costs import ServerCosts
from ridgeline.workflows.optimize.server_driver import RestartableServer
from tests.handicaps.virtual_servers import COMMANDS, Traffic, VirtualServers

MODEL, HEAD, DRAFT = "llama-3.1-8b", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "llama-3.2-1b"
RUN = TwinRun(device="h100-sxm", num_devices=1, acceptance=0.2, drafter_acceptance=0.75)
CASES = [
    (server, method) for server, methods in drafter_table().servers.items() for method in methods
]


def text_of(method: str) -> str:
    return {"mtp": "mtp", "draft": f"draft:{DRAFT}"}.get(method, f"{method}:{HEAD}")


def twin(server: str, flags: dict[str, str]) -> TwinConfig:
    words = shlex.join(word for pair in flags.items() for word in pair)
    kind, line = read_command(f"{COMMANDS[server].format(model=MODEL)} {words}")
    assert kind.name == server
    assert set(line.unknown) <= {"--speculative-eagle-topk"}
    return twin_of(line, RUN)


def decode_s(config: TwinConfig, batch: int) -> float:
    times = step_times_of(config, plan_twin(config).replica)
    return times.step_s([(1, 1000)] * batch, batch)


@pytest.mark.parametrize(("server", "method"), CASES)
def test_twins_read_what_the_rungs_write(server: str, method: str) -> None:
    [rung] = drafter_rungs(server, [text_of(method)])
    assert rung.honesty == "exact" and set(rung.variants[0][FLAGS]) <= drafter_flags(server)
    configs = [twin(server, variant[FLAGS]) for variant in rung.variants]
    depths = tuple(config.num_speculative_tokens for config in configs)
    assert depths == drafter_table().depths[method]
    kind = "model" if method == "draft" else "head"
    assert {config.drafter.kind for config in configs} == {kind}
    assert {config.acceptance for config in configs} == {0.75}


def test_drafter_costs_time_memory_and_pays_less_in_large_batches() -> None:
    [head] = drafter_rungs("vllm", [text_of("eagle3")])
    [draft] = drafter_rungs("vllm", [text_of("draft")])
    plain = twin("vllm", {})
    by_head, by_model = (twin("vllm", rung.variants[0][FLAGS]) for rung in (head, draft))
    free = msgspec.structs.replace(by_head, drafter=plain.drafter)
    tokens = [plan_twin(config).num_kv_tokens for config in (plain, by_head, by_model)]
    assert tokens == sorted(tokens, reverse=True) and tokens[2] > 0.5 * tokens[0]
    assert decode_s(free, 1) < decode_s(by_head, 1) < decode_s(by_model, 1) < decode_s(plain, 1)
    gains = [decode_s(plain, batch) / decode_s(by_head, batch) for batch in (1, 256)]
    assert 1.8 < gains[0] < 2.7 and gains[1] < 0.75 * gains[0]  # at most 1 + a + a^2 + a^3 = 2.73


def test_drafter_that_leaves_no_cache_does_not_start() -> None:
    [rung] = drafter_rungs("vllm", ["draft:llama-3.1-8b"])
    config = msgspec.structs.replace(twin("vllm", rung.variants[0][FLAGS]), device="l4")
    with pytest.raises(DoesNotFit):
        plan_twin(config)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("medusa:x", "unknown method"),
        ("eagle3", "needs a checkpoint"),
        ("eagle3:", "needs a checkpoint"),
        ("mtp:x", "model's checkpoint"),
    ],
)
def test_wrong_drafter_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        parse_drafter(text)


def test_server_without_such_a_flag_is_named() -> None:
    with pytest.raises(BadInput, match="tgi takes no such drafter"):
        drafter_rungs("tgi", [f"eagle3:{HEAD}"])


@pytest.mark.parametrize("server", drafter_table().servers)
def test_drafter_of_the_command_line_is_replaced(server: str, tmp_path: Path) -> None:
    """The baseline has the head with two drafts; the rung's variants change their number."""
    text = text_of("eagle3")
    [rung] = drafter_rungs(server, [text])
    own = next(v[FLAGS] for v in rung.variants if "2" in "".join(v[FLAGS].values()).split(HEAD)[1])
    words = shlex.join(word for pair in own.items() for word in pair)
    command = f"{COMMANDS[server].format(model=MODEL)} --port {{port}} {words} {{flags}}"
    options = RestartableServer(
        url="http://h:{port}", restart_cmd=command, candidate_drafters=(text,)
    )
    recipe = server_recipe(options, tmp_path)
    start = recipe.start_settings(Settings(model=f"dummy:{MODEL}"))
    candidates = list(candidates_of(rung, start, {}))
    assert len(candidates) == len(rung.variants) - 1
    for candidate in candidates:
        changed = recipe.command.words(recipe.flags.words(candidate.settings, start), 8000)
        assert len(changed) == len(recipe.command.words((), 8000))
        _, line = read_command(shlex.join(changed))
        assert line.num_draft_tokens in (3, 5) and line.drafter.kind == "head"


def test_gain_of_a_drafter_is_predicted_and_that_of_lookups_is_not(tmp_path: Path) -> None:
    command = f"ridgeline twin --device h100-sxm vllm serve {MODEL} --port {{port}} {{flags}}"
    options = RestartableServer(
        url="http://h:{port}", restart_cmd=command, candidate_drafters=(f"eagle3:{HEAD}",)
    )
    recipe = server_recipe(options, tmp_path)
    start = recipe.start_settings(Settings(model=f"dummy:{MODEL}"))
    costs = ServerCosts(None, recipe, start)
    [rung] = recipe.candidate_rungs
    by_head, *_ = candidates_of(rung, start, {})
    effect = costs.flag_effect(by_head.settings, start)
    assert effect is not None and 0.4 < effect([(1, 500)] * 4, 4) < 0.65
    assert effect([(2048, 0)], 0) == pytest.approx(1, abs=0.01)


def searched(acceptance: float) -> LadderResult:
    """A search with nothing but a head on the ladder, on a virtual clock."""
    servers = VirtualServers(
        "vllm",
        "--max-num-seqs 8",
        traffic=Traffic(prompt=64, output=32),
        device="l4",
        model="qwen3-8b",
        drafters=(f"eagle3:{HEAD}",),
        drafter_acceptance=acceptance,
    )
    ladder = servers.ladder
    job = OptimizeJob(
        settings=servers.start,
        defaults=servers.start,
        workload="w",
        slo=Slo.parse("ttft:1500 tpot:55"),
        objective="goodput",
        budget_s=600.0,
        price=MachinePrice(),
    )
    only = tuple(rung for rung in ladder.rungs if rung.id == "drafter-1")
    ladder = msgspec.structs.replace(ladder, rungs=only)
    return asyncio.run(optimize(job, servers.environment(), ladder, clock=servers.clock))


@pytest.mark.slow
def test_search_keeps_a_head_that_pays() -> None:
    result = searched(0.75)
    assert "kept" in [trial.verdict for trial in result.trials]
    assert result.total is not None and result.total.low > 1.1


@pytest.mark.slow
def test_search_keeps_no_head_whose_drafts_are_rejected() -> None:
    result = searched(0.02)
    assert "kept" not in [trial.verdict for trial in result.trials]
