"""Twins of other servers: their command lines, and what their flags do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from ridgeline.config.server import ServerOptions, TwinServerOptions
from ridgeline.engine.build import make_scheduler
from ridgeline.errors import BadInput, DoesNotFit
from ridgeline.measure.monitors.server_metrics import identify_server, parse_page
from ridgeline.optimize.external.server_flags import server_flags_for
from ridgeline.plan.simulate.kv_tiers import add_tiers
from ridgeline.plan.simulate.single import Arrival, SimulationTrace, simulate
from ridgeline.twin.build import (
    block_bytes_of,
    plan_twin,
    resolved_settings,
    step_times_of,
    tiers_of,
)
from ridgeline.twin.config import TwinConfig
from ridgeline.twin.servers.behaviour import (
    COMPILE_S,
    LAUNCH_ATTENTION_S,
    LAUNCH_LAYER_S,
    READ_KERNELS_S,
    TwinRun,
    compiles,
    startup_s,
    twin_of,
)
from ridgeline.twin.servers.command_line import ServerLine, programs, read_command, server_kinds
from ridgeline.twin.servers.kernel_cache import kernel_file, note_compiled
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


def decode_s(
    flags: str, *, server: str = "vllm", run: TwinRun = RUN, batch: int = 16, context: int = 1000
) -> float:
    """Modelled seconds of a decode step of a server with these flags."""
    config = twin_of(line_of(flags, server), run)
    times = step_times_of(config, plan_twin(config).replica)
    return times.step_s([(1, context)] * batch, batch)


def simulated(flags: str, server: str, prompts: Sequence[tuple[float, int]]) -> SimulationTrace:
    """Requests on the scheduler and the step times of the twin, on a virtual clock.

    `prompts`: the time and the length of each; all begin with the same tokens.
    """
    config = twin_of(line_of(flags, server), RUN)
    model = plan_twin(config)
    scheduler = make_scheduler(resolved_settings(config, model, model.replica.spec))
    arrivals = [
        Arrival(at_s=at_s, prompt=tuple(range(length)), num_output=8) for at_s, length in prompts
    ]
    times = step_times_of(config, model.replica)
    return simulate(scheduler, arrivals, times.step_s, end_s=1e9)


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
        assert not line.unknown and not line.unrecognized


def test_flags_are_read_with_and_without_equals() -> None:
    line = line_of("--max-num-seqs 12 --max-num-batched-tokens=2048 --no-enable-prefix-caching")
    assert (line.max_num_seqs, line.max_num_batched_tokens) == (12, 2048)
    assert not line.prefix_caching


def test_last_of_two_equal_flags_counts() -> None:
    assert line_of("--max-num-seqs 2 --max-num-seqs 64").max_num_seqs == 64


def test_flags_without_effect_and_unknown_ones_are_listed() -> None:
    line = line_of("--foo bar --baz --dtype half --disable-log-stats --max-num-seqs 3")
    assert line.unknown == ("--dtype", "--disable-log-stats")
    assert line.unrecognized == ("--foo", "bar", "--baz")
    assert line.max_num_seqs == 3


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
    """A step of many bytes is nearly divided; the communication does not shrink with it."""
    full = {"batch": 64, "context": 4000}
    assert full["batch"] * full["context"] < kv_tokens("")
    assert decode_s("-tp 4", **full) < 0.4 * decode_s("", **full)
    assert decode_s("-tp 4") < decode_s("-tp 2") < decode_s("")
    assert decode_s("-dp 4") == decode_s("")


@pytest.mark.parametrize(
    ("server", "flags"),
    [
        ("vllm", """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'"""),
        ("sglang", "--speculative-algorithm NGRAM --speculative-num-draft-tokens 4"),
        ("tgi", "--speculate 4"),
        ("llama-server", "--spec-type ngram-simple --spec-ngram-simple-size-m 4"),
    ],
)
def test_accepted_drafts_shorten_the_step_per_token_and_refused_ones_lengthen_it(
    server: str, flags: str
) -> None:
    good, bad = (
        decode_s(flags, server=server, run=msgspec.structs.replace(RUN, acceptance=share), batch=1)
        for share in (0.6, 0.0)
    )
    plain = decode_s("", server=server, batch=1)
    assert good < 0.7 * plain
    assert bad > plain


def test_accepted_drafts_also_save_launches_and_scheduling() -> None:
    host = "--enforce-eager --no-async-scheduling"
    drafts = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'"""
    assert decode_s(f"{host} {drafts}", batch=1) < 0.7 * decode_s(host, batch=1)


@pytest.mark.parametrize(
    ("server", "off"),
    [
        ("vllm", "--no-enable-prefix-caching"),
        ("sglang", "--disable-radix-cache"),
        ("llama-server", "--no-cache-prompt"),
    ],
)
def test_prefix_cache_saves_the_tokens_of_a_repeated_prompt(server: str, off: str) -> None:
    twice = [(0.0, 1600), (10.0, 1600)]
    cached = simulated("", server, twice).requests
    assert [request.cached_tokens >= 1500 for request in cached] == [False, True]
    assert [request.cached_tokens for request in simulated(off, server, twice).requests] == [0, 0]


@pytest.mark.parametrize(
    ("server", "on", "off"),
    [
        ("vllm", "--max-model-len 8192", "--max-model-len 8192 --no-enable-chunked-prefill"),
        ("sglang", "--context-length 8192", "--context-length 8192 --chunked-prefill-size -1"),
    ],
)
def test_chunked_prefill_fills_the_token_budget(server: str, on: str, off: str) -> None:
    """Two prompts of 6,000 tokens in steps of at most 8,192: the second one is split, or waits."""

    def first_step(flags: str) -> list[int]:
        steps = simulated(flags, server, [(0.0, 6000), (0.0, 6000)]).steps
        return [new for new, _ in steps[0].shapes]

    assert first_step(on) == [6000, 2192]
    assert first_step(off) == [6000]


EXAMPLES = Path(__file__).parents[2] / "examples" / "trtllm"
VALUES = {
    "host": "h",
    "port": "1",
    "served_model_name": "x",
    "api_key": "k",
    "seed": "5",
    "tp": "2",
    "dp": "2",
    "ep": "2",
    "max_num_seqs": "7",
    "max_num_batched_tokens": "4097",
    "max_model_len": "4096",
    "memory_share": "0.8",
    "block_size": "32",
    "num_drafts": "3",
    "quantization": "fp8",
    "kv_cache_dtype": "fp8",
    "speculation": "ngram",
    "num_draft_steps": "3",
    "draft_model": "llama-3.2-1b",
    "offload_gib": "16",
    "offload_ratio": "4",
    "compile_level": "1",
    "config_file": str(EXAMPLES / "kv_fp8.yaml"),
}
"""A value other than the default of each field."""

STANDALONE = f"--speculative-algorithm STANDALONE --speculative-draft-model {MODEL}"
NEEDED = {
    ("sglang", "num_draft_steps"): "--speculative-algorithm EAGLE3",
    (
        "sglang",
        "draft_model",
    ): f"--speculative-algorithm STANDALONE --speculative-draft-model {MODEL}",
    ("sglang", "offload_ratio"): "--enable-hierarchical-cache",
    ("llama-server", "num_draft_steps"): "--spec-type draft-mtp",
    ("llama-server", "draft_model"): f"--spec-type draft-simple -md {MODEL}",
}
"""Flags without which a field has no effect."""


def effect(line: ServerLine) -> tuple[object, ...]:
    """Everything that a command line decides: the twin, its start, and its address."""
    config = twin_of(line, RUN)
    plan = plan_twin(TwinConfig(model=MODEL, device="h100-sxm"))
    served = (line.host, line.port, line.served_model_name, line.api_key)
    return (config, startup_s(line, plan), *served)


@pytest.mark.parametrize("server", COMMANDS)
def test_every_listed_flag_has_an_effect(server: str) -> None:
    """A flag without an effect must not be listed: the twin names those that are not."""
    kind = server_kinds()[server]
    for flag, field in kind.flags.items():
        value = VALUES[field]
        if flag in ("--speculative-config", "-sc"):
            value = """'{"method":"ngram"}'"""
        needed = NEEDED.get((server, field), "")
        changed, other = line_of(f"{needed} {flag} {value}", server), line_of(needed, server)
        assert effect(changed) != effect(other), flag
    base = line_of("-tp 2" if server == "vllm" else "", server)  # experts need several devices
    for flag, fields in kind.switches.items():
        assert fields, flag
        for field, value in fields.items():
            on, off = (msgspec.structs.replace(base, **{field: x}) for x in (value, not value))
            assert effect(on) != effect(off), flag


def test_evicted_prefixes_come_back_from_host_memory() -> None:
    """Six prefixes take turns in a cache that holds two of them."""
    prompts = [(tuple(range(9000 * (i % 6), 9000 * (i % 6) + 2048))) for i in range(24)]
    cached, durations = [], []
    for flags in ("", "--kv-offloading-size 8"):
        config = msgspec.structs.replace(twin_of(line_of(flags), RUN), kv_tokens=5120)
        model = plan_twin(config)
        scheduler = make_scheduler(resolved_settings(config, model, model.replica.spec))
        add_tiers(scheduler, tiers_of(config, model), block_bytes_of(config, model))
        arrivals = [
            Arrival(at_s=float(i), prompt=prompt, num_output=4) for i, prompt in enumerate(prompts)
        ]
        times = step_times_of(config, model.replica)
        run = simulate(scheduler, arrivals, times.step_s, end_s=1e9)
        cached.append(sum(request.cached_tokens for request in run.requests))
        durations.append(sum(request.token_s[0] - request.sent_s for request in run.requests))
    assert cached == [0, 18 * 2032]  # all but the first of each prefix; one block is computed
    assert durations[1] < 0.75 * durations[0]


def test_hierarchical_cache_is_a_multiple_of_the_device_cache() -> None:
    config = twin_of(line_of("--enable-hierarchical-cache --hicache-ratio 3", "sglang"), RUN)
    model = plan_twin(config)
    kv_bytes = model.num_kv_tokens * model.replica.cost.kv_bytes_per_token
    assert model.offload_bytes == pytest.approx(3 * kv_bytes)
    assert plan_twin(twin_of(line_of("", "sglang"), RUN)).offload_bytes == 0


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


def test_later_start_finds_what_an_earlier_one_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, line = read_command("vllm serve llama-3.1-8b")
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    assert kernel_file(line) is None
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    file = kernel_file(line)
    assert file is not None and not file.exists()
    note_compiled(file)
    slots = kernel_file(read_command("vllm serve llama-3.1-8b --max-num-seqs 8")[1])
    assert slots == file and file.exists(), "the batch limit is not part of the program"
    other = kernel_file(read_command("vllm serve llama-3.1-8b --kv-cache-dtype fp8")[1])
    assert other is not None and not other.exists()
    model = plan_twin(twin_of(line, RUN))
    saved_s = startup_s(line, model) - startup_s(line, model, finds_kernels=True)
    assert saved_s == COMPILE_S - READ_KERNELS_S
    eager = read_command("vllm serve llama-3.1-8b --enforce-eager")[1]
    assert not compiles(eager)


@pytest.mark.parametrize(
    ("flag", "layer_s", "is_compiled"),
    [
        ("-O0", LAUNCH_LAYER_S, False),
        ("--optimization-level 0", LAUNCH_LAYER_S, False),
        ("-O1", LAUNCH_ATTENTION_S, True),
        ("-O 1", LAUNCH_ATTENTION_S, True),
        ("-O3", 0.0, True),
        ("", 0.0, True),
    ],
)
def test_compile_level_acts_on_launches_and_the_start(
    flag: str, layer_s: float, is_compiled: bool
) -> None:
    line = read_command(f"vllm serve llama-3.1-8b {flag}")[1]
    assert twin_of(line, RUN).host.layer_s == layer_s
    assert compiles(line) == is_compiled and not line.unknown


def test_configuration_files_of_the_example_act_on_the_twin(tmp_path: Path) -> None:
    def read(name: str) -> ServerLine:
        return line_of(f"--config {EXAMPLES / name}", "trtllm")

    assert read("kv_fp8.yaml").kv_cache_dtype == "fp8"
    ngram = read("ngram.yaml")
    assert ngram.num_draft_tokens == 4 and not ngram.overlapped
    assert read("overlap.yaml").overlapped and read("overlap.yaml").graphs
    unseen = read("max_utilization.yaml").unknown
    assert "scheduler_config.capacity_scheduler_policy" in unseen[0]
    (tmp_path / "eager.yaml").write_text("cuda_graph_config: null\nmax_batch_size: 7\n")
    eager = line_of(f"--max_batch_size 9 --config {tmp_path / 'eager.yaml'}", "trtllm")
    assert (eager.graphs, eager.max_num_seqs) == (False, 7)


def test_configuration_file_that_is_elsewhere_is_named() -> None:
    line = line_of("--extra_llm_api_options /where/the/server/is.yaml", "trtllm")
    assert line.unknown == ("/where/the/server/is.yaml",)


@pytest.mark.parametrize("program", sorted(programs()))
def test_optimize_knows_the_server_of_every_program_that_a_twin_takes(program: str) -> None:
    command = f"ridgeline twin --speed 10 {program} serve llama-3.1-8b {{flags}}"
    [server] = [kind.name for kind in server_kinds().values() if program in kind.programs]
    assert server_flags_for(command).name == server


def test_short_names_of_twins_are_no_programs_elsewhere() -> None:
    with pytest.raises(BadInput, match="does not name a known server"):
        server_flags_for("./start.sh --model-id /data/tgi {flags}")
