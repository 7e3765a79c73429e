"""The kept configuration in every form: written, and read back by Ridgeline's own parsers."""

from __future__ import annotations

import shlex

import msgspec
import pytest
import yaml

from ridgeline.config.settings import Speculative
from ridgeline.optimize.external.server_flags import load_server_flags
from ridgeline.optimize.output.server_configs import (
    OWN_FILES,
    STARTS,
    TunedServer,
    deployment_files,
    program_words,
    read_back,
    split_command,
)
from ridgeline.optimize.server_settings import ServerSettings
from ridgeline.twin.servers.command_line import read_command

LINES = {
    "vllm": "vllm serve org/m --port 9000 --max-num-seqs 64 --max-num-batched-tokens 4096 "
    "--tensor-parallel-size 2 --no-enable-prefix-caching --speculative-config "
    """'{"method": "ngram", "num_speculative_tokens": 4}'""",
    "sglang": "python -m sglang.launch_server --model-path org/m --max-running-requests 64 "
    "--chunked-prefill-size 4096 --tp-size 2 --disable-radix-cache",
    "trtllm": "trtllm-serve org/m --port 9000 --max_batch_size 64 --max_num_tokens 4096 "
    "--tp_size 2 --kv_cache_free_gpu_memory_fraction 0.8",
    "tgi": "text-generation-launcher --model-id org/m --max-concurrent-requests 64 --num-shard 2",
    "llama-server": "llama-server --model m.gguf --parallel 64 --kv-unified --port 9000",
}


def tuned(kind: str) -> TunedServer:
    flags = load_server_flags()[kind]
    given = flags.given(LINES[kind])
    own = (("--tensor-parallel-size", "2"),) if kind == "vllm" else ()
    settings = msgspec.convert(
        {"model": "org/m", **flags.defaults, **given, "server_flags": own}, ServerSettings
    )
    words = tuple(shlex.split(LINES[kind]))
    return TunedServer(kind=kind, words=words, model="org/m", settings=settings)


@pytest.mark.parametrize("kind", LINES)
def test_every_form_of_the_tuned_server_is_read_back(kind: str) -> None:
    server = tuned(kind)
    files = deployment_files(server)
    expected = read_command(LINES[kind])[1]
    for name in ("compose.yaml", "kubernetes.yaml", OWN_FILES.get(kind)):
        if name is None:
            continue
        words = read_back(kind, name, files[name])
        line = read_command(shlex.join(words))[1]
        assert line == msgspec.structs.replace(expected, unknown=line.unknown), name
        assert sorted(line.unknown) == sorted(expected.unknown), name
        flags = load_server_flags()[kind]
        assert flags.given(shlex.join(words)) == flags.given(LINES[kind]), name


@pytest.mark.parametrize("kind", LINES)
def test_other_servers_get_the_settings_that_they_have(kind: str) -> None:
    server = tuned(kind)
    files = deployment_files(server)
    for other in STARTS.keys() - {kind}:
        text = files[f"{other}.sh"]
        words = read_back(other, f"{other}.sh", text)
        line = read_command(shlex.join(words))[1]
        assert line.model == "org/m"
        given = load_server_flags()[other].given(shlex.join(words))
        default = load_server_flags()[other].defaults.get("max_num_seqs")
        assert given.get("max_num_seqs", default) == 64
        assert "measure before you rely on it" in text
    assert f"{kind}.sh" not in files


def test_settings_without_a_flag_are_named() -> None:
    server = tuned("vllm")
    drafting = msgspec.structs.replace(
        server.settings, speculative_config=Speculative(method="ngram")
    )
    files = deployment_files(msgspec.structs.replace(server, settings=drafting))
    assert "--speculate 4" in files["tgi.sh"]
    assert "--speculative-algorithm NGRAM" in files["sglang.sh"]
    assert "# speculative_config=" in files["trtllm.sh"]
    assert "--num-shard 2" in files["tgi.sh"] and "--tp-size 2" in files["sglang.sh"]
    own = ServerSettings(model="org/m", server_flags=(("--attention-backend", "FLASHINFER"),))
    files = deployment_files(msgspec.structs.replace(server, settings=own))
    assert "--attention-backend flashinfer" in files["sglang.sh"]
    assert "# --attention-backend FLASHINFER: no equal flag of tgi is known." in files["tgi.sh"]


def test_containers_have_the_devices_and_the_port() -> None:
    files = deployment_files(tuned("vllm"))
    pod = yaml.safe_load(files["kubernetes.yaml"])["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert container["ports"] == [{"containerPort": 9000}]
    service = yaml.safe_load(files["compose.yaml"])["services"]["llm"]
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == 2 and service["ports"] == ["9000:9000"]


def test_command_line_is_taken_from_the_servers_program_on() -> None:
    flags = load_server_flags()
    words = shlex.split("env A=1 ridgeline twin --device l4 vllm serve m --max-num-seqs 4")
    assert program_words(words, flags["vllm"]) == ("vllm", "serve", "m", "--max-num-seqs", "4")
    words = shlex.split("srun python -m sglang.launch_server --model-path m")
    assert program_words(words, flags["sglang"])[:2] == ("python", "-m")
    assert program_words(["./start.sh"], flags["vllm"]) == ("./start.sh",)


def test_model_and_flags_are_separated() -> None:
    words = shlex.split("vllm serve org/m --max-num-seqs=4 --enforce-eager")
    pairs = [("--max-num-seqs", "4"), ("--enforce-eager", "true")]
    assert split_command(words, "vllm") == ("org/m", pairs)
    assert split_command(shlex.split("sglang serve --model-path x"), "sglang") == ("x", [])
