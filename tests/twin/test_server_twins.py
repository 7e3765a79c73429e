"""Twins of other servers: their command lines, and what their flags do."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from ridgeline.config.server import ServerOptions, TwinServerOptions
from ridgeline.errors import BadInput, DoesNotFit
from ridgeline.measure.monitors.server_metrics import identify_server, parse_page
from ridgeline.optimize.external.server_flags import server_flags_for
from ridgeline.twin.build import plan_twin
from ridgeline.twin.servers.behaviour import TwinRun, startup_s, twin_of
from ridgeline.twin.servers.command_line import ServerLine, read_command, server_kinds
from ridgeline.twin.step_times import TwinStepTimes
from ridgeline.workflows.serving.twin_of_server import open_twin

MODEL = "llama-3.1-8b"
RUN = TwinRun(device="h100-sxm", num_devices=8)
COMMANDS = {
    "vllm": f"vllm serve {MODEL}",
    "sglang": f"python3 -m sglang.launch_server --model-path {MODEL}",
    "trtllm": f"trtllm-serve {MODEL}",
    "tgi": f"text-generation-launcher --model-id {MODEL}",
    "llama-server": f"llama-server -m {MODEL}",
}


def line_of(flags: str, server: str = "vllm") -> ServerLine:
    return read_command(f"{COMMANDS[server]} {flags}")[1]


def decode_s(flags: str, *, batch: int = 16, context: int = 1000) -> float:
    """Modelled seconds of a decode step of a vLLM server with these flags."""
    config = twin_of(line_of(flags), RUN)
    replica = plan_twin(config).replica
    return TwinStepTimes(replica, None, config.host).step_s([(1, context)] * batch, batch)


def kv_tokens(flags: str) -> int:
    return plan_twin(twin_of(line_of(flags), RUN)).num_kv_tokens


def start_s(flags: str) -> float:
    line = line_of(flags)
    return startup_s(line, plan_twin(twin_of(line, RUN)))


def test_every_server_has_a_command_line() -> None:
    assert set(COMMANDS) == set(server_kinds())
    for server, command in COMMANDS.items():
        kind, line = read_command(command)
        assert (kind.name, line.server, line.model) == (server, server, MODEL)
        assert line.max_num_seqs == kind.defaults["max_num_seqs"]
        assert not line.unknown


def test_flags_are_read_with_and_without_equals() -> None:
    line = line_of("--max-num-seqs 12 --max-num-batched-tokens=2048 --no-enable-prefix-caching")
    assert (line.max_num_seqs, line.max_num_batched_tokens) == (12, 2048)
    assert not line.prefix_caching


def test_last_of_two_equal_flags_counts() -> None:
    assert line_of("--max-num-seqs 2 --max-num-seqs 64").max_num_seqs == 64


def test_unknown_flags_are_listed() -> None:
    assert line_of("--foo bar --baz --max-num-seqs 3").unknown == ("--foo", "--baz")


def test_speculative_config_names_its_drafts() -> None:
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 5})
    assert line_of(f"--speculative-config '{config}'").num_draft_tokens == 5
    assert line_of("").num_draft_tokens == 0
    with pytest.raises(BadInput, match="not JSON"):
        _ = line_of("--speculative-config '{method'").num_draft_tokens


@pytest.mark.parametrize(
    "command", ["", "nginx -g x", "vllm serve", f"vllm serve {MODEL} --port", "vllm 'serve"]
)
def test_command_line_that_starts_no_known_server_is_refused(command: str) -> None:
    with pytest.raises(BadInput):
        read_command(command)


def test_eager_steps_wait_for_their_launches() -> None:
    assert decode_s("--enforce-eager", batch=1) > decode_s("", batch=1)
    assert start_s("--enforce-eager") < start_s("") - 30


def test_quantised_weights_make_steps_shorter_and_leave_more_memory() -> None:
    assert decode_s("--quantization fp8") < 0.75 * decode_s("")
    assert kv_tokens("--quantization fp8") > kv_tokens("") + 40_000


def test_fp8_kv_cache_holds_twice_the_tokens() -> None:
    assert kv_tokens("--kv-cache-dtype fp8") == pytest.approx(2 * kv_tokens(""), rel=0.01)


def test_tensor_parallel_shortens_steps_and_replicas_do_not() -> None:
    assert decode_s("-tp 4") < 0.55 * decode_s("")
    assert decode_s("-dp 4") == decode_s("")


def test_memory_share_decides_the_cache() -> None:
    assert kv_tokens("--gpu-memory-utilization 0.5") < 0.5 * kv_tokens("")
    with pytest.raises(DoesNotFit, match="OutOfMemoryError"):
        kv_tokens("--gpu-memory-utilization 0.99")


def test_scheduling_that_does_not_overlap_lengthens_steps() -> None:
    assert decode_s("--no-async-scheduling") > decode_s("") + 0.0005


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(BadInput, match="available GPUs"):
        twin_of(line_of("-tp 4 -dp 4"), RUN)


def test_unknown_format_is_refused() -> None:
    with pytest.raises(BadInput, match="quantisation"):
        twin_of(line_of("--quantization fancy"), RUN)


def test_search_reads_the_flags_of_the_server_behind_a_twin() -> None:
    command = "ridgeline twin --device h100-sxm:8 vllm serve m --max-num-seqs 2 {flags}"
    flags = server_flags_for(command)
    assert flags.name == "vllm"
    assert flags.given(command)["max_num_seqs"] == 2
    assert server_flags_for("ridgeline serve demo {flags}").name == "ridgeline"


SIGNS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt-llm", "tgi": "tgi"}
SIGNS["llama-server"] = "llama.cpp"


@pytest.mark.parametrize("server", COMMANDS)
def test_twin_speaks_the_metrics_of_its_server(server: str) -> None:
    kind, line = read_command(COMMANDS[server])
    options = TwinServerOptions(command=COMMANDS[server])
    app, engine, _ = open_twin(kind, line, options, ServerOptions(port=0, served_model_name=MODEL))
    try:
        client = TestClient(app, base_url="http://127.0.0.1")
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 3}
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        page = client.get("/metrics").text
        assert identify_server(parse_page(page)) == SIGNS[server]
        assert "ridgeline_twin{" in page
        assert client.get("/ridgeline/config").status_code == 404
        for path in kind.pages:
            reply = client.get(path)
            assert reply.status_code == 200 and reply.json()
            assert "x-ridgeline-twin" in reply.headers
    finally:
        engine.close()
