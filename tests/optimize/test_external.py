"""Optimising another server: its flags, its processes, and steps inferred from its tokens.

The server of the end-to-end test is a small script with real queueing: slots, a step time that
grows with the batch, and prompts that cost time; its flags decide how it behaves.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from ridgeline.config.settings import Settings, settings_from
from ridgeline.errors import BadInput, CannotRun
from ridgeline.measure.monitors.server_metrics import parse_page
from ridgeline.measure.workload import parse_workload
from ridgeline.optimize.drivers.server_process import (
    ActiveServer,
    ServerCommand,
    ServerProcess,
    answers,
    models_url,
)
from ridgeline.optimize.environment import Load, arrival_times_s
from ridgeline.optimize.external.inferred_steps import infer_steps
from ridgeline.optimize.external.server_deployment import (
    WARMUP_REQUESTS,
    ModelAndKey,
    ServerAddress,
    ServerDeployment,
    ServerPrompts,
    check_settings_applied,
    read_logprobs,
    server_info,
)
from ridgeline.optimize.external.server_flags import NOTHING, load_server_flags, server_flags_for
from ridgeline.optimize.ladder import candidates_of, load_default_ladder
from ridgeline.records import RequestTrace, RunTrace, StepStat
from tests.diagnose.mock_thread import mock_server

# ---- flags -------------------------------------------------------------------------------------


def test_only_changed_settings_become_flags() -> None:
    vllm = load_server_flags()["vllm"]
    start = settings_from({"model": "demo", **vllm.defaults})
    assert vllm.words(start, start) == []
    other = settings_from(
        {"model": "demo", **vllm.defaults, "max_num_seqs": 512, "enable_prefix_caching": False}
    )
    assert vllm.words(other, start) == ["--no-enable-prefix-caching", "--max-num-seqs", "512"]


def test_a_setting_without_a_flag_is_refused_by_name() -> None:
    llama = load_server_flags()["llama-server"]
    start = settings_from({"model": "demo", **llama.defaults})
    with pytest.raises(CannotRun, match="quantization=int8"):
        llama.words(
            settings_from({"model": "demo", **llama.defaults, "quantization": "int8"}), start
        )
    with pytest.raises(CannotRun, match="batching=dynamic"):
        llama.words(
            settings_from({"model": "demo", **llama.defaults, "batching": "dynamic"}), start
        )


@pytest.mark.parametrize("name", sorted(load_server_flags()))
def test_every_flag_is_read_back_from_a_command_line(name: str) -> None:
    """`given` is the inverse of `words`: whatever one writes, the other finds."""
    dialect = load_server_flags()[name]
    start = settings_from({"model": "demo", **dialect.defaults})
    for setting, flag in dialect.flags.items():
        values = [48] if isinstance(flag, str) else [v for v in flag if v != NOTHING]
        for value in values:
            plain = {"true": True, "false": False}.get(str(value), value)
            if setting == "speculative_config":
                plain = {"method": value, "num_speculative_tokens": 3}
            asked = settings_from({"model": "demo", setting: plain})
            words = [dialect._flag(setting, getattr(asked, setting))]
            found = dialect.given(" ".join(["server", *words, "--other", "1"]))
            assert found.get(setting) == plain, (setting, value)
    assert dialect.given("server --model x") == {}
    assert isinstance(start, Settings)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/opt/bin/llama-server -m x.gguf {flags}", "llama-server"),
        ("vllm serve m {flags}", "vllm"),
        ("python -m vllm.entrypoints.openai.api_server {flags}", "vllm"),
        ("python -m sglang.launch_server {flags}", "sglang"),
    ],
)
def test_server_is_recognised_by_its_program(command: str, name: str) -> None:
    assert server_flags_for(command).name == name


def test_an_unknown_server_names_the_flag_to_give() -> None:
    with pytest.raises(BadInput, match="--server"):
        server_flags_for("my-server {flags}")
    with pytest.raises(BadInput, match="ollama"):
        server_flags_for("my-server {flags}", "ollama")


def test_shipped_rungs_apply_to_other_servers() -> None:
    """The batch limit at least can be turned on every server that is known."""
    [rung] = [rung for rung in load_default_ladder().rungs if rung.id == "batch-limit"]
    for dialect in load_server_flags().values():
        start = settings_from({"model": "demo", "max_num_seqs": 8} | dialect.defaults)
        options = candidates_of(rung, start, {"max_num_seqs": 8})
        assert any(dialect.words(option.settings, start) for option in options), dialect.name


# ---- the process -------------------------------------------------------------------------------

SERVER = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port = int(sys.argv[sys.argv.index("--port") + 1])
print("arguments", sys.argv[1:], flush=True)
if "--fail" in sys.argv:
    sys.exit("no such weights")
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"data": [{"id": "m"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return f"{sys.executable} {path} --port {{port}} {{flags}}"


def test_two_configurations_run_side_by_side_and_stop(script: str, tmp_path: Path) -> None:
    recipe = ServerCommand(url="http://127.0.0.1:{port}", command=script, start_timeout_s=20)
    slot = ActiveServer(recipe.side_by_side)
    a = ServerProcess(recipe, ["--max-num-seqs", "8"], tmp_path / "a.log")
    b = ServerProcess(recipe, [], tmp_path / "b.log")
    slot.activate(a)
    slot.activate(b)
    assert a.url != b.url and a.is_up and b.is_up
    assert "'--max-num-seqs', '8'" in (tmp_path / "a.log").read_text()
    slot.retire(a)
    slot.retire(b)
    assert not a.is_up and not b.is_up


def test_fixed_port_allows_one_server_at_a_time(tmp_path: Path, script: str) -> None:
    from ridgeline.optimize.drivers.server_process import free_port

    port = free_port()
    recipe = ServerCommand(
        url=f"http://127.0.0.1:{port}",
        command=script.replace("{port}", str(port)),
        start_timeout_s=20,
    )
    slot = ActiveServer(recipe.side_by_side)
    a, b = (ServerProcess(recipe, [], tmp_path / f"{name}.log") for name in "ab")
    for server, other in ((a, b), (b, a), (a, b)):
        slot.activate(server)
        assert server.is_up and not other.is_up
    slot.retire(a)
    assert not a.is_up


def test_a_server_that_dies_shows_the_end_of_its_log(script: str, tmp_path: Path) -> None:
    recipe = ServerCommand(url="http://127.0.0.1:{port}", command=script, start_timeout_s=20)
    server = ServerProcess(recipe, ["--fail"], tmp_path / "dead.log")
    with pytest.raises(CannotRun, match="no such weights"):
        server.start()
    assert not server.is_up


KILLED = """
import signal, sys
from pathlib import Path
from ridgeline.optimize.drivers import server_process
server_process.END_S = 0.0
command = server_process.ServerCommand(url="http://127.0.0.1:{port}", command=sys.argv[1])
driver = server_process.ProcessDriver(command, Path(sys.argv[2])).__enter__()
servers = [driver.configure([], Path(sys.argv[2], f"{i}.log")) for i in range(2)]
for server in servers:
    server.start()
print(*(server.url for server in servers), flush=True)
signal.pause()
"""


def test_servers_end_if_the_search_is_killed(script: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", KILLED, script, str(tmp_path)]
    search = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert search.stdout is not None
    urls = search.stdout.readline().split()
    assert len(urls) == 2 and all(answers(models_url(url)) for url in urls)
    search.kill()
    search.communicate()
    stop_s = time.monotonic() + 20
    while time.monotonic() < stop_s and any(answers(models_url(url)) for url in urls):
        time.sleep(0.05)
    assert not any(answers(models_url(url)) for url in urls)


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    recipe = ServerCommand(url="http://127.0.0.1:1", command="no-such-program {flags}")
    with pytest.raises(CannotRun, match="no-such-program"):
        ServerProcess(recipe, [], tmp_path / "x.log").start()


@pytest.mark.parametrize(
    ("url", "command", "named"),
    [
        ("http://h:1", "vllm serve m", "{flags}"),
        ("http://h:1", "vllm serve m --x={flags}", "{flags}"),
        ("http://h:{port}", "vllm serve m {flags}", "{port}"),
        ("http://h:1", "vllm serve 'm {flags}", "command line"),
    ],
)
def test_unusable_deployment_recipe_is_rejected(url: str, command: str, named: str) -> None:
    with pytest.raises(BadInput) as caught:
        ServerCommand(url=url, command=command)
    assert named in str(caught.value)


# ---- what clients see --------------------------------------------------------------------------


def served(seed: int, num_requests: int) -> tuple[RunTrace, list[tuple[float, int, int]]]:
    """A run whose steps are known: (seconds, decoding sequences, prompt tokens) of each."""
    rng = random.Random(seed)
    waiting = sorted((rng.uniform(0, 1.0), rng.randint(20, 200)) for _ in range(num_requests))
    done: list[tuple[float, int, list[float]]] = []
    live: list[tuple[float, int, list[float]]] = []
    steps, now_s = [], 0.0
    while waiting or live:
        new = [w for w in waiting if w[0] <= now_s]
        waiting = [w for w in waiting if w[0] > now_s]
        if not new and not live:
            now_s = waiting[0][0]
            continue
        took_s = 0.01 + 0.002 * (len(live) + len(new)) + 1e-4 * sum(prompt for _, prompt in new)
        steps.append((took_s, len(live), sum(prompt for _, prompt in new)))
        now_s += took_s
        live += [(at_s, prompt, []) for at_s, prompt in new]
        for _, _, times in live:
            times.append(now_s + rng.uniform(0, 2e-4))  # the network's jitter
        done += [each for each in live if len(each[2]) == 12]
        live = [each for each in live if len(each[2]) < 12]
    return _run(done), steps


def _run(done: list[tuple[float, int, list[float]]]) -> RunTrace:
    requests = tuple(
        RequestTrace(
            id=str(i),
            kind="chat",
            scheduled_s=at_s,
            sent_s=at_s,
            started_s=None,
            token_s=tuple(times),
            token_counts=(1,) * len(times),
            finished_s=times[-1],
            prompt_tokens=prompt,
            cached_tokens=0,
            output_tokens=len(times),
            requested_tokens=len(times),
            finish_reason="length",
        )
        for i, (at_s, prompt, times) in enumerate(done)
    )
    return RunTrace(
        target="t",
        workload="w",
        arrivals="a",
        seed=0,
        started_unix_s=0.0,
        duration_s=max(times[-1] for _, _, times in done),
        requests=requests,
    )


@pytest.mark.parametrize("seed", range(4))
def test_steps_are_inferred_from_token_times(seed: int) -> None:
    """As many steps as there were, with the same sequences, tokens and times."""
    run, truth = served(seed, num_requests=14)
    found = infer_steps(run, Settings(enable_prefix_caching=False))
    assert len(found) == len(truth)
    for step, (seconds, decoding, prompt) in zip(found, truth, strict=True):
        assert sum(1 for new, _ in step.shapes if new == 1) == decoding
        assert sum(new for new, _ in step.shapes if new > 1) == prompt
        # A request that came while a step ran waits for its end: its own step began there.
        assert step.run_s == pytest.approx(seconds, abs=5e-4)


def test_no_steps_are_inferred_from_multi_token_chunks() -> None:
    run, _ = served(0, num_requests=3)
    blurred = tuple(
        msgspec.structs.replace(r, token_counts=(2,) * len(r.token_s)) for r in run.requests
    )
    assert infer_steps(msgspec.structs.replace(run, requests=blurred), Settings()) == ()


def test_unreported_cache_hits_come_from_the_workload() -> None:
    run, truth = served(1, num_requests=14)
    whole = sum(prompt for _, _, prompt in truth)
    found = infer_steps(run, Settings(enable_prefix_caching=True), shared_share=0.5)
    assert _computed(found) == pytest.approx(whole / 2, rel=0.05)
    requests = tuple(msgspec.structs.replace(r, cached_tokens=16) for r in run.requests)
    reporting_run = msgspec.structs.replace(run, requests=requests)
    found = infer_steps(reporting_run, Settings(), shared_share=0.5)
    assert _computed(found) == whole - 16 * len(requests)


def _computed(steps: tuple[StepStat, ...]) -> int:
    """Prompt tokens that were computed."""
    return sum(new for step in steps for new, _ in step.shapes if new > 1)


def test_logprobs_of_both_layouts() -> None:
    old = {
        "choices": [
            {
                "text": "ab",
                "logprobs": {
                    "tokens": ["a", "b"],
                    "top_logprobs": [{"a": -0.1, "c": -2.6}, {"b": -0.5}],
                },
            }
        ]
    }
    assert read_logprobs(old) == (["a", "b"], [pytest.approx(2.5), float("inf")])
    rows = [{"token": "a", "top_logprobs": [{"logprob": -0.1}, {"logprob": -2.6}]}]
    assert read_logprobs({"choices": [{"logprobs": {"content": rows}}]}) == (
        ["a"],
        [pytest.approx(2.5)],
    )
    assert read_logprobs({"choices": [{"text": "ab", "logprobs": None}]}) == (["a", "b"], [])


async def test_a_server_is_warmed_once_per_start() -> None:
    """Its first requests are not measured, and their prompts never come again."""
    with mock_server(ttft_s=0.001, itl_s=0.001) as url:
        starts = iter([1, 1, 2])
        info = server_info(Settings(model="demo"), {}, "steady")
        workload = parse_workload("synthetic:input=8,output=2")
        deployment = ServerDeployment(
            lambda: ServerAddress(url, next(starts)),
            ModelAndKey("steady"),
            ServerPrompts(workload, workload),
            info,
            {},
        )
        load = Load(rate=100.0, seed=1, window_s=0.05, grace_s=1.0)
        served = [0]
        for _ in range(3):
            run = await deployment.run(load)
            with urllib.request.urlopen(f"{url}/metrics") as reply:
                page = parse_page(reply.read().decode())
            served.append(int(page["vllm:prompt_tokens_total"]) // 8)
            assert len(run.requests) == len(arrival_times_s(load))
        await asyncio.sleep(0.05)  # the client's connections end
    extra = [b - a - len(arrival_times_s(load)) for a, b in pairwise(served)]
    assert extra[0] >= 2 * WARMUP_REQUESTS and extra[2] >= 2 * WARMUP_REQUESTS
    assert extra[1] == 0


def test_flag_ignored_by_the_server_is_reported() -> None:
    start = Settings(model="demo", max_num_seqs=4)
    more = msgspec.structs.replace(start, max_num_seqs=8)
    check_settings_applied(more, start, {"max_num_seqs": 8})
    check_settings_applied(
        start, start, {"max_num_seqs": 2}
    )  # the baseline is what the server says it is
    with pytest.raises(CannotRun, match=r"did not take the flag for max_num_seqs.*4 by its own"):
        check_settings_applied(more, start, {"max_num_seqs": 4})
