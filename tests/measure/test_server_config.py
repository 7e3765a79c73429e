"""How each server says that it is set up; and a change of it that changed nothing is called so."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from ridgeline.cli.render.measure.compare import print_comparison
from ridgeline.diagnose import facts_of
from ridgeline.measure.client.http_connection import HttpConnectionError, HttpReply
from ridgeline.measure.metrics.summary import summarise
from ridgeline.measure.monitors.server_config import ELSEWHERE, fetch_engine_info
from ridgeline.measure.results.event_log import write_run
from ridgeline.measure.results.vllm_result import vllm_result
from ridgeline.records import EngineInfo
from ridgeline.workflows.compare_runs import compare_runs
from tests.diagnose.faults import LOADS, Engine, run

PAGES = Path(__file__).parent / "pages"
LLAMA = {
    "total_slots": 4,
    "default_generation_settings": {"n_ctx": 4096, "params": {"top_k": 40}},
    "chat_template": "x" * 5000,
    "build_info": "b1-0",
}
OURS = EngineInfo(
    model="demo",
    settings={"max_num_seqs": 64, "enable_prefix_caching": True},
    derivations={},
    max_model_len=2048,
    num_blocks=8,
    block_size=16,
    weight_bytes=1000,
    kv_bytes_per_token=6,
    device="cpu",
    compute_dtype="float32",
)


class Pages:
    """A server of fixed pages."""

    def __init__(self, **pages: str) -> None:
        self.pages = {"/" + name.replace("__", "/"): text for name, text in pages.items()}

    async def get(self, path: str) -> HttpReply:
        text = self.pages.get(path)
        return HttpReply(404, {}) if text is None else HttpReply(200, {}, text.encode())


def reported_info(**pages: str) -> EngineInfo | None:
    return asyncio.run(fetch_engine_info(Pages(**pages), "", "m"))


def test_a_running_vllms_labels():
    found = reported_info(metrics=(PAGES / "vllm-0.32.txt").read_text(encoding="utf-8"))
    assert found.device == ELSEWHERE and found.model == "m"
    assert found.settings["block_size"] == "128"
    assert found.settings["gpu_memory_utilization"] == "0.92"
    assert "hash_block_size" not in found.settings  # "None" means not reported


def test_a_llama_servers_props():
    page = (PAGES / "llama.cpp-0.5.0-dev.txt").read_text(encoding="utf-8")
    found = reported_info(metrics=page, props=json.dumps(LLAMA))
    assert found.settings["total_slots"] == 4
    assert found.settings["default_generation_settings.n_ctx"] == 4096
    assert found.settings["default_generation_settings.params.top_k"] == 40
    assert "chat_template" not in found.settings


def test_own_server_reports_its_full_configuration():
    body = json.dumps({"version": "1", "slo": None, **msgspec.to_builtins(OURS)})
    found = reported_info(
        metrics="vllm:num_requests_running 0\nridgeline_steps 1\n", ridgeline__config=body
    )
    assert found == OURS


@pytest.mark.parametrize(
    "pages",
    [
        {},
        {"metrics": "other 1\n"},
        {"metrics": "tgi_queue_size 1\n", "info": "<html>"},
        {"metrics": "sglang:num_running_reqs 1\n"},
    ],
)
def test_server_without_configuration_has_no_settings(pages):
    assert reported_info(**pages) is None


def test_server_that_closes_the_connection_is_no_error():
    class Gone:
        async def get(self, path):
            raise HttpConnectionError("gone")

    assert asyncio.run(fetch_engine_info(Gone(), "", "m")) is None


def test_unreported_settings_stay_unknown():
    record, _ = run(Engine(), LOADS[0])
    page = (PAGES / "vllm-0.32.txt").read_text(encoding="utf-8")
    facts = facts_of(msgspec.structs.replace(record, info=reported_info(metrics=page)))
    assert "weight_bytes" not in facts and facts["enable_prefix_caching"] == "True"


@pytest.mark.parametrize("form", ["log", "json"])
def test_setting_without_effect_is_named(tmp_path, form):
    """Two servers that differ in a flag alone, measured over HTTP, and equally fast."""
    page = (PAGES / "vllm-0.32.txt").read_text(encoding="utf-8")
    record, _ = run(Engine(), LOADS[0])
    blind = msgspec.structs.replace(record, steps=())
    sides = []
    for number, value in enumerate(("True", "False")):
        info = reported_info(
            metrics=page.replace('prefix_caching="True"', f'prefix_caching="{value}"')
        )
        side = msgspec.structs.replace(blind, info=info)
        sides.append(tmp_path / f"{number}.json{'l' if form == 'log' else ''}")
        if form == "log":
            write_run(side, sides[-1])
        else:
            sides[-1].write_bytes(msgspec.json.encode(vllm_result(side, summarise(side))))
    console = Console(record=True, width=200)
    comparison = compare_runs(*sides)
    assert comparison.conclusion == "not regressed"
    print_comparison(comparison, console)
    text = console.export_text()
    assert "this change had no effect: enable_prefix_caching True → False" in text
