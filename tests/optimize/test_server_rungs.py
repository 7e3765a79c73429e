"""Rungs of other servers: their tables, raw flags, and the quality gate over HTTP."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ridgeline.config.settings import Settings, Speculative
from ridgeline.errors import BadInput, CannotRun
from ridgeline.measure.workload import parse_workload
from ridgeline.optimize.drivers.server_process import ServerCommand, replace_flags
from ridgeline.optimize.external.server_deployment import (
    ModelAndKey,
    ServerAddress,
    ServerDeployment,
    ServerPrompts,
    read_late_s,
    server_info,
    spread_logprobs,
)
from ridgeline.optimize.external.server_flags import load_server_flags
from ridgeline.optimize.external.server_rungs import (
    parallel_rungs,
    server_rungs,
    with_server_rungs,
)
from ridgeline.optimize.ladder import (
    candidates_of,
    load_default_ladder,
    parse_ladder,
    unmet_need,
)
from ridgeline.optimize.server_settings import (
    REMOVE,
    ServerSettings,
    changed_settings,
    recorded_settings,
)
from ridgeline.twin.servers.command_line import ServerLine, read_command
from ridgeline.workflows.optimize.restartable_server import server_recipe
from ridgeline.workflows.optimize.server_driver import RestartableServer

COMMANDS = {
    "vllm": "vllm serve m",
    "sglang": "sglang serve --model-path m",
    "trtllm": "trtllm-serve m",
    "tgi": "text-generation-launcher --model-id m",
    "llama-server": "llama-server -m m",
}
SERVERS = tuple(COMMANDS)


def recipe_of(command: str):  # type: ignore[no-untyped-def]
    server = RestartableServer(url="http://127.0.0.1:{port}", restart_cmd=command)
    return server_recipe(server, Path())


@pytest.mark.parametrize("server", SERVERS)
def test_every_server_has_rungs_that_make_candidates(server: str) -> None:
    start = ServerSettings(model="demo")
    rungs = server_rungs(server)
    assert rungs
    for rung in rungs:
        candidates = list(candidates_of(rung, start, {}))
        assert candidates, rung.id
        for candidate in candidates:
            words = load_server_flags()[server].words(candidate.settings, start)
            assert words and words[0].removeprefix(REMOVE).startswith("--")
            assert words[0].removeprefix(REMOVE) in candidate.label


def test_engine_without_flags_gets_no_candidates_of_a_server() -> None:
    (rung, *_) = server_rungs("vllm")
    assert list(candidates_of(rung, Settings(model="demo"), {})) == []


def test_flags_that_were_kept_stay_in_later_candidates() -> None:
    first, *_ = server_rungs("vllm")
    start = ServerSettings(model="demo", server_flags=(("--async-scheduling", ""),))
    candidate = next(candidates_of(first, start, {}))
    assert ("--async-scheduling", "") in candidate.settings.server_flags  # type: ignore[attr-defined]
    words = load_server_flags()["vllm"].words(candidate.settings, start)
    assert words == ["--gpu-memory-utilization", "0.92"]


def test_flag_of_the_command_with_the_same_value_is_no_candidate() -> None:
    recipe = recipe_of("vllm serve m --gpu-memory-utilization 0.92 --port {port} {flags}")
    start = recipe.start_settings(Settings(model="demo"))
    assert start.server_flags == (("--gpu-memory-utilization", "0.92"),)
    rung = next(rung for rung in server_rungs("vllm") if rung.id == "vllm-memory-share")
    assert [c.label for c in candidates_of(rung, start, {})] == [
        "Memory share (--gpu-memory-utilization 0.95)"
    ]


def test_flag_is_replaced_where_it_stands() -> None:
    command = ServerCommand(
        url="http://h:{port}",
        command="vllm serve m --max-num-seqs 4 --enforce-eager --port {port} {flags}",
    )
    words = command.words(["--max-num-seqs", "64", "--seed", "-1"], 80)
    assert words == [
        *("vllm", "serve", "m", "--max-num-seqs", "64", "--enforce-eager", "--port", "80"),
        *("--seed", "-1"),
    ]
    negative = ServerCommand(
        url="http://h", command="vllm serve m --seed 5 --enforce-eager {flags}"
    )
    assert negative.words(["--seed", "-1"], None) == [
        *("vllm", "serve", "m", "--seed", "-1", "--enforce-eager"),
    ]
    json = 'vllm serve m --speculative-config \'{"method": "ngram"}\' {flags}'
    assert ServerCommand(url="http://h", command=json).words(
        ["--speculative-config", '{"method": "suffix"}'], None
    ) == ["vllm", "serve", "m", "--speculative-config", '{"method": "suffix"}']
    assert "--max-num-seqs=4" not in ServerCommand(
        url="http://h", command="vllm serve m --max-num-seqs=4 {flags}"
    ).words(["--max-num-seqs", "8"], None)


def test_devices_are_used_as_replicas_and_as_tensor_parallel() -> None:
    (rung,) = parallel_rungs("vllm", 8)
    flags = [variant["server_flags"] for variant in rung.variants]
    assert [row["--tensor-parallel-size"] for row in flags] == ["1", "2", "4", "8"]
    assert [row["--data-parallel-size"] for row in flags] == ["8", "4", "2", "1"]
    assert parallel_rungs("vllm", None) == parallel_rungs("llama-server", 8) == ()


def test_twin_begins_with_its_own_defaults_and_its_devices_peaks() -> None:
    command = "ridgeline twin --device l4:2 {0} --port {{port}} {{flags}}"
    for server, line in COMMANDS.items():
        recipe = recipe_of(command.format(line))
        twin = read_command(line)[1]
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if name in recipe.settings_in_command:
                assert recipe.settings_in_command[name] == getattr(twin, name), server
        assert recipe.twin_device == "l4"
    assert recipe_of("ridgeline twin vllm serve m --port {port} {flags}").twin_device == "h100-sxm"
    assert recipe_of("vllm serve m --device l4 --port {port} {flags}").twin_device is None


@pytest.mark.parametrize("server", SERVERS)
def test_flags_of_the_search_reach_the_twin_of_the_server(server: str) -> None:
    """Two tables spell the same flags: what the search sets must change the twin's field."""
    flags, start = load_server_flags()[server], ServerSettings(model="demo")
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
        if name in flags.flags:
            words = flags.words(msgspec.structs.replace(start, **{name: 48}), start)
            assert getattr(line_of(server, words), name) == 48
    for name, field in (
        ("enable_prefix_caching", "prefix_caching"),
        ("enable_chunked_prefill", "chunked_prefill"),
    ):
        if name in flags.flags:
            off = msgspec.structs.replace(start, **{name: False})
            on = msgspec.structs.replace(start, **{name: True})
            assert getattr(line_of(server, []), field) is flags.defaults[name]
            words = merged([], flags.words(off, start))
            assert not getattr(line_of(server, words), field)
            assert getattr(line_of(server, merged(words, flags.words(on, off))), field)
    if "speculative_config" in flags.flags:
        drafting = msgspec.structs.replace(start, speculative_config=Speculative(method="ngram"))
        assert line_of(server, flags.words(drafting, start)).num_draft_tokens == 4


def merged(words: list[str], flags: list[str]) -> list[str]:
    kept, added = replace_flags(words, flags)
    return [*kept, *added]


def line_of(server: str, words: list[str]) -> ServerLine:
    return read_command(shlex.join([*shlex.split(COMMANDS[server]), *words]))[1]


def test_rungs_of_a_server_follow_those_of_the_ladder() -> None:
    ladder = load_default_ladder()
    extended = with_server_rungs(ladder, load_server_flags()["vllm"], 2)
    ids = [rung.id for rung in extended.rungs]
    shared = [rung.id for rung in ladder.rungs if rung.id in ids]
    assert ids[: len(shared)] == shared
    assert {"batch-limit", "token-budget", "prefix-caching", "ngram-speculation"} <= set(shared)
    assert ids[-1] == "vllm-parallel"


@pytest.mark.parametrize(
    ("command", "settings", "flags"),
    [
        ("llama-server -m x -np 1 -b 512 {flags}", {"max_num_seqs": 1}, {}),
        ("/opt/bin/llama-server -m x -np=2 {flags}", {"max_num_seqs": 2}, {}),
        ("vllm serve m -tp 8 -O0 {flags}", {}, {"--tensor-parallel-size": "8"}),
        ("vllm serve m -q fp8 {flags}", {}, {"--quantization": "fp8"}),
        ("sglang serve --model-path m --tp 2 {flags}", {}, {"--tp-size": "2"}),
        ("trtllm-serve m --tensor_parallel_size 2 {flags}", {}, {"--tp_size": "2"}),
    ],
)
def test_short_spellings_are_read_and_replaced(
    command: str, settings: dict[str, int], flags: dict[str, str]
) -> None:
    """A flag that is not recognised would be set a second time, before or after the first."""
    server = RestartableServer(url="http://127.0.0.1:1", restart_cmd=command)
    recipe = server_recipe(server, Path())
    start = recipe.start_settings(Settings(model="demo"))
    assert settings.items() <= recipe.settings_in_command.items()
    assert flags.items() <= dict(start.server_flags).items()
    for flag in flags:
        words = recipe.command.words([flag, "X"], None)
        assert [word for word in words if word.startswith(flag)] == [flag]
        assert words[words.index(flag) + 1] == "X"


def test_ladder_of_the_example_tries_every_file_of_trtllm() -> None:
    root = Path(__file__).parents[2]
    ladder = parse_ladder((root / "examples/trtllm/ladder.toml").read_text(encoding="utf-8"))
    start = ServerSettings(model="demo", max_num_seqs=64, max_num_batched_tokens=8192)
    candidates = [c for rung in ladder.rungs for c in candidates_of(rung, start, {})]
    words = [load_server_flags()["trtllm"].words(c.settings, start) for c in candidates]
    files = {word for line in words for word in line if word.endswith(".yaml")}
    assert files == {f"examples/trtllm/{p.name}" for p in (root / "examples/trtllm").glob("*.yaml")}
    assert ["--max_batch_size", "128"] in words


@pytest.mark.parametrize(("slots", "applies"), [(4, False), (1024, True)])
def test_rungs_of_large_batches_need_slots_for_them(slots: int, applies: bool) -> None:
    """The number of running requests is not known of another server; its limit is."""
    ids = {"vllm-graph-sizes", "vllm-stream-interval", "vllm-api-servers"}
    rungs = [rung for rung in server_rungs("vllm") if rung.id in ids]
    facts = {"max_num_seqs": slots, "server_eager": False}
    assert len(rungs) == 3
    assert all((unmet_need(rung, facts) is None) == applies for rung in rungs)


def test_words_before_the_program_keep_their_meaning() -> None:
    flags = load_server_flags()["llama-server"]
    spelt = flags.spell_out("taskset -c 1 nice -n 5 llama-server -c 512 -t 2")
    assert spelt == "taskset -c 1 nice -n 5 llama-server --ctx-size 512 --threads 2"
    assert flags.spell_out("./start.sh -np 1") == "./start.sh -np 1"


@pytest.mark.parametrize(
    ("command", "applies"),
    [("-O0", True), ("-O 1", True), ("--optimization-level=1", True), ("-O3", False), ("", False)],
)
def test_low_compile_level_is_raised(command: str, applies: bool) -> None:
    recipe = recipe_of(f"vllm serve m {command} --port {{port}} {{flags}}")
    rung = next(rung for rung in server_rungs("vllm") if rung.id == "vllm-compile-level")
    assert (unmet_need(rung, recipe.facts) is None) == applies
    words = recipe.command.words(["--optimization-level", "2"], 1)
    assert sum("-O" in word or "optimization" in word for word in words) == 1
    defaults = recipe.default_settings(Settings(model="demo"))
    restored = dict(defaults.server_flags)
    assert ("!--optimization-level" in restored) == (command != "")


def test_rungs_without_a_flag_on_the_server_are_left_out() -> None:
    extended = with_server_rungs(load_default_ladder(), load_server_flags()["vllm"], None)
    assert not {"int8", "native-kernels", "thread-plan"} & {rung.id for rung in extended.rungs}
    own = with_server_rungs(load_default_ladder(), load_server_flags()["ridgeline"], None)
    assert "int8-activations" not in {rung.id for rung in own.rungs}
    assert "kv-int8" in {rung.id for rung in own.rungs}


def test_switch_without_an_opposite_is_taken_out_of_the_command_line() -> None:
    command = "sglang serve --model-path m --disable-radix-cache --port {port} {flags}"
    recipe = recipe_of(command)
    start = recipe.start_settings(Settings(model="demo"))
    assert not start.enable_prefix_caching
    caching = msgspec.structs.replace(start, enable_prefix_caching=True)
    words = recipe.command.words(recipe.flags.words(caching, start), 80)
    assert words == ["sglang", "serve", "--model-path", "m", "--port", "80"]


def test_switches_of_the_command_are_facts_that_rungs_require() -> None:
    eager = recipe_of("sglang serve --model-path m --disable-cuda-graph --port {port} {flags}")
    assert (eager.facts["server_eager"], eager.facts["server_sync"]) == (True, False)
    sync = recipe_of("vllm serve m --no-async-scheduling --port {port} {flags}")
    assert (sync.facts["server_eager"], sync.facts["server_sync"]) == (False, True)


def test_devices_that_the_command_spreads_the_server_over_are_a_fact() -> None:
    spread = recipe_of("vllm serve m -tp 4 -dp 2 --port {port} {flags}")
    assert spread.facts["server_devices"] == 8
    assert recipe_of("vllm serve m --port {port} {flags}").facts["server_devices"] == 1


LATE = b"""# TYPE ridgeline_twin_late_seconds counter
ridgeline_twin_late_seconds_total 1.5
"""


@pytest.mark.parametrize(
    ("page", "late_s"), [(LATE, 1.5), (b"vllm:num_requests_running 0\n", None)]
)
def test_twin_tells_how_late_its_steps_were(page: bytes, late_s: float | None) -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert read_late_s(f"http://127.0.0.1:{server.server_port}/v1") == late_s
        finally:
            server.shutdown()
            thread.join()


def test_ladder_file_adds_raw_flags() -> None:
    text = """
[[rung]]
id = "own"
title = "Own"
technique = ""
honesty = "exact"
term = "t"
why = "w"
hurts_when = "h"
risk = 0
complexity = 0
variants = [{ server_flags = { "--numa" = "distribute" } }]
"""
    (rung,) = parse_ladder(text).rungs
    (candidate,) = candidates_of(rung, ServerSettings(model="demo"), {})
    assert candidate.label == "Own (--numa distribute)"
    with pytest.raises(BadInput, match="table of strings"):
        parse_ladder(text.replace('"distribute"', "3"))


def test_flags_are_recorded_with_the_settings() -> None:
    settings = ServerSettings(model="demo", max_num_seqs=9, server_flags=(("--a", "1"),))
    assert recorded_settings(changed_settings(settings)) == settings
    assert type(recorded_settings(changed_settings(Settings(model="demo")))) is Settings


# ---- the gate over HTTP


class Scoring(BaseHTTPRequestHandler):
    """Answers prompt_logprobs of one distribution everywhere, to those with a key."""

    scores = True

    def do_POST(self) -> None:
        body = msgspec.json.decode(self.rfile.read(int(self.headers["content-length"])))
        if body["model"] != "m" or self.headers["authorization"] != "Bearer secret":
            self.send_error(400, f"{body['model']}, {self.headers['authorization']}")
            return
        row = {"3": {"logprob": float(np.log(0.75))}, "5": {"logprob": float(np.log(0.125))}}
        rows = [None, *[row] * (len(body["prompt"]) - 1)] if self.scores else None
        reply = msgspec.json.encode({"choices": [{"prompt_logprobs": rows}]})
        self.send_response(200)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def scoring_url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Scoring)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def deployment(url: str) -> ServerDeployment:
    info = server_info(Settings(model="demo"), {}, "m")
    workload = parse_workload("synthetic:input=8,output=4")
    model = ModelAndKey("m", "secret")
    prompts = ServerPrompts(workload, workload)
    return ServerDeployment(lambda: ServerAddress(url, 1), model, prompts, info, {}, 10)


def test_distributions_are_read_as_prompt_logprobs(scoring_url: str) -> None:
    logprobs_TV = deployment(scoring_url).logprobs_of([1, 2, 3, 4])
    assert logprobs_TV.shape == (4, 10)
    assert np.allclose(np.exp(logprobs_TV).sum(1), 1.0, atol=1e-5)
    assert np.allclose(np.exp(logprobs_TV[:, 3]), 0.75)
    assert np.allclose(np.exp(logprobs_TV[:, 0]), 0.125 / 8)


def test_server_without_prompt_logprobs_is_named(
    scoring_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scoring, "scores", False)
    with pytest.raises(CannotRun, match="prompt_logprobs"):
        deployment(scoring_url).logprobs_of([1, 2])


def test_equal_rows_have_no_divergence() -> None:
    rows = [{"1": {"logprob": -0.5}, "2": {"logprob": -1.5}}]
    first, second = spread_logprobs(rows, 50), spread_logprobs(rows, 50)
    assert float((np.exp(first) * (first - second)).sum()) == 0.0


@pytest.mark.parametrize("server", ["vllm", "llama-server"])
def test_draft_length_is_halved_and_doubled_from_the_servers_first_one(server: str) -> None:
    recipe = recipe_of(COMMANDS[server] + " --port {port} {flags}")
    start = recipe.start_settings(Settings(model="dummy:tiny"))
    ladder = with_server_rungs(load_default_ladder(), recipe.flags, None)
    rungs = {rung.id: rung for rung in ladder.rungs}
    assert not list(candidates_of(rungs["draft-length"], start, {})), "nothing drafts"
    [drafting] = candidates_of(rungs["ngram-speculation"], start, {})
    lengths = {}
    for candidate in candidates_of(rungs["draft-length"], drafting.settings, {}):
        words = recipe.flags.words(candidate.settings, start)
        lengths[candidate.label] = recipe.flags.given(shlex.join(words))["speculative_config"]
    assert lengths == {
        f"Draft length (num_speculative_tokens={depth})": {
            "method": "ngram",
            "num_speculative_tokens": depth,
        }
        for depth in (2, 8)
    }


def test_speculation_on_a_command_line_is_read_however_its_json_is_spaced() -> None:
    config = '{"prompt_lookup_max":4,"method":"ngram","prompt_lookup_min":2'
    config += ',"num_speculative_tokens":7}'
    given = load_server_flags()["vllm"].given(f"vllm serve m --speculative-config '{config}'")
    assert given["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 7}


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("vllm", '--speculative-config {"method":"ngram","num_speculative_tokens":7}'),
        ("sglang", "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8"),
        (
            "llama-server",
            "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 8",
        ),
    ],
)
def test_speculation_is_taken_out_of_the_command_with_its_values(server: str, words: str) -> None:
    given = words.split() if server != "vllm" else words.split(" ", 1)
    text = shlex.join([*shlex.split(COMMANDS[server]), *given, "--seed", "1"])
    recipe = server_recipe(
        RestartableServer(url="http://h", restart_cmd=f"{text} {{flags}}"), Path()
    )
    start = recipe.start_settings(Settings(model="demo"))
    ladder = with_server_rungs(load_default_ladder(), recipe.flags, None)
    facts = {**recipe.facts, **msgspec.structs.asdict(start)}
    rungs = [r for r in ladder.rungs if r.id.endswith("no-speculation")]
    [rung] = [r for r in rungs if unmet_need(r, facts) is None]
    [option] = candidates_of(rung, start, {})
    left = recipe.command.words(recipe.flags.words(option.settings, start), None)
    assert left == [*shlex.split(COMMANDS[server]), "--seed", "1"]
    line = read_command(shlex.join(left))[1]
    assert line.num_draft_tokens == 0
    plain = RestartableServer(url="http://h", restart_cmd=f"{COMMANDS[server]} {{flags}}")
    facts = {**server_recipe(plain, Path()).facts, "speculative_config": None}
    assert all(unmet_need(r, facts) for r in rungs)
