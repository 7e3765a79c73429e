"""`ridgeline pull` as a process against a hub on loopback: its files, and every failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hub.hub_server import COMMIT, TOKEN, HubState, Repository, loopback_hub

pytestmark = pytest.mark.slow

WEIGHTS = bytes(range(256)) * 8000
SAFETENSORS = Repository(
    files={
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "README.md": b"# Not needed",
        "modeling_evil.py": b"raise SystemExit('remote code ran')",
        "pytorch_model.bin": b"pickled" * 100,
        "consolidated.safetensors": WEIGHTS,
        "model.safetensors": WEIGHTS,
        "onnx/model.onnx": b"x",
    }
)
GGUF = Repository(
    files={
        "m-Q4_K_M.gguf": b"GGUF" + WEIGHTS,
        "m-Q8_0.gguf": b"GGUF" + WEIGHTS * 2,
        "big-F16-00001-of-00002.gguf": b"GGUF first",
        "big-F16-00002-of-00002.gguf": b"GGUF second",
        "mmproj-F16.gguf": b"GGUF",
    }
)


def pull(hub: HubState, home: Path, name: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`ridgeline pull` with an empty home, from this hub."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "RIDGELINE_"))}
    places = {"HF_HOME": str(home / "hf"), "RIDGELINE_CACHE": str(home / "ridgeline")}
    return subprocess.run(
        [sys.executable, "-m", "ridgeline", "pull", name],
        env={**kept, **places, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def failed(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, and one line that holds these words and a fix."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("ridgeline: ")]
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr and "fix: " in lines[0], done.stderr
    for word in words:
        assert word in lines[0], lines[0]


def test_a_safetensors_repository_is_fetched_without_code_or_pickles(tmp_path: Path) -> None:
    with loopback_hub(org__m=SAFETENSORS) as hub:
        done = pull(hub, tmp_path, "org/m")
        assert done.returncode == 0, done.stderr
        pinned, path = done.stdout.split()
        assert pinned == f"hf:org/m@{COMMIT}"
        assert {file.name for file in Path(path).iterdir()} == {
            *("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")
        }
        assert (Path(path) / "model.safetensors").read_bytes() == WEIGHTS
        num_transfers = len(hub.downloads())
        again = pull(hub, tmp_path, "org/m")
        assert again.returncode == 0 and len(hub.downloads()) == num_transfers
    offline = pull(hub, tmp_path, f"hf:org/m@{COMMIT}")  # the hub is gone
    failed(offline, "the download of org/m failed", hub.url, "check the network")


def test_a_new_commit_of_a_branch_is_fetched_by_pull(tmp_path: Path) -> None:
    with loopback_hub(org__m=SAFETENSORS) as hub:
        assert pull(hub, tmp_path, "org/m").returncode == 0
        newer = {**SAFETENSORS.files, "model.safetensors": b"new" * 100}
        hub.repositories["org/m"] = replace(SAFETENSORS, files=newer, commit="f" * 40)
        done = pull(hub, tmp_path, "org/m")
        pinned, path = done.stdout.split()
        assert (
            pinned.endswith("f" * 40)
            and (Path(path) / "model.safetensors").read_bytes()[:3] == b"new"
        )


def test_a_gguf_file_is_chosen_by_its_quantisation(tmp_path: Path) -> None:
    with loopback_hub(org__g=GGUF) as hub:
        done = pull(hub, tmp_path, "org/g:q4_k_m")
        assert done.stdout.endswith("m-Q4_K_M.gguf\n"), done.stderr
        assert [path for path, _ in hub.downloads()] == ["/cdn/org/g/m-Q4_K_M.gguf"]
        parts = pull(hub, tmp_path, "org/g:F16")
        assert parts.stdout.endswith("big-F16-00001-of-00002.gguf\n")
        assert len(hub.downloads()) == 3
        failed(pull(hub, tmp_path, "org/g"), "several GGUF files", "m-Q4_K_M.gguf, m-Q8_0.gguf")
        failed(pull(hub, tmp_path, "org/g:Q2_K"), "no GGUF file", "'Q2_K'", "m-Q8_0.gguf")


def test_a_broken_transfer_is_continued_where_it_stopped(tmp_path: Path) -> None:
    weights = WEIGHTS * 12  # more than one chunk of the library, which writes 10 MB at a time
    files = {"config.json": b"{}", "model.safetensors": weights}
    repo = Repository(files=files, cut_after=15_000_000)
    with loopback_hub(org__m=repo) as hub:
        done = pull(hub, tmp_path, "org/m")
        assert done.returncode == 0, done.stderr
        path = Path(done.stdout.split()[1])
        assert (path / "model.safetensors").read_bytes() == weights
        ranges = [r for _, r in hub.downloads()]
        assert ranges[0] is None and ranges[1] is not None and ranges[1].startswith("bytes=")


def test_weights_with_a_wrong_hash_are_removed(tmp_path: Path) -> None:
    with loopback_hub(org__m=replace(SAFETENSORS, damaged=True)) as hub:
        done = pull(hub, tmp_path, "org/m")
        failed(done, "model.safetensors of org/m arrived damaged", "SHA-256", "limit: ")
        assert not list(tmp_path.rglob("model.safetensors"))
        hub.repositories["org/m"].damaged = False
        assert pull(hub, tmp_path, "org/m").returncode == 0


def test_a_gated_model_needs_a_token(tmp_path: Path) -> None:
    with loopback_hub(org__m=replace(SAFETENSORS, gated=True)) as hub:
        for environ in ({}, {"HF_TOKEN": "hf_wrong"}):
            done = pull(hub, tmp_path, "org/m", **environ)
            failed(done, "gated", "'org/m'", f"accept the terms at {hub.url}/org/m", "HF_TOKEN")
        assert pull(hub, tmp_path, "org/m", HF_TOKEN=TOKEN).returncode == 0


def test_an_unknown_repository_or_revision_is_named(tmp_path: Path) -> None:
    with loopback_hub(org__m=SAFETENSORS) as hub:
        failed(pull(hub, tmp_path, "org/other"), "'org/other'", "no such model directory")
        failed(pull(hub, tmp_path, "hf:org/m@v9"), "no such revision", "'v9'")


def test_a_rate_limit_is_waited_for_and_reported(tmp_path: Path) -> None:
    with loopback_hub(org__m=replace(SAFETENSORS, too_many=2)) as hub:
        done = pull(hub, tmp_path, "org/m")
        assert done.returncode == 0 and "waiting 1 s" in done.stderr, done.stderr
    with loopback_hub(org__m=replace(SAFETENSORS, too_many=99, retry_after="3600")) as hub:
        done = pull(hub, tmp_path / "other", "org/m")
        failed(done, "limits how often", "status 429", "again in 3600 s", "HF_TOKEN")


def test_a_server_error_and_a_missing_network_have_different_errors(tmp_path: Path) -> None:
    with loopback_hub(org__m=replace(SAFETENSORS, broken=503)) as hub:
        failed(pull(hub, tmp_path, "org/m"), "org/m", "503", hub.url)
    failed(pull(hub, tmp_path, "org/m"), "the download of org/m failed", hub.url, "HF_ENDPOINT")


def test_offline_mode_uses_the_cache_and_nothing_else(tmp_path: Path) -> None:
    with loopback_hub(org__m=SAFETENSORS) as hub:
        failed(pull(hub, tmp_path, "org/m", HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE", "'org/m'")
        assert not hub.requests


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, ("pickled", "pytorch_model.bin")),
        ({"data.parquet": b"x"}, ("no weights of a language model", "data.parquet")),
    ],
)
def test_a_repository_without_readable_weights_is_refused(
    files: dict[str, bytes], words: tuple[str, ...], tmp_path: Path
) -> None:
    with loopback_hub(org__m=Repository(files=files)) as hub:
        failed(pull(hub, tmp_path, "org/m"), "org/m", *words)
        assert not hub.downloads()


def test_models_lists_what_was_pulled(tmp_path: Path) -> None:
    with loopback_hub(org__m=SAFETENSORS) as hub:
        path = pull(hub, tmp_path, "org/m").stdout.split()[1]
    listed = subprocess.run(
        [sys.executable, "-m", "ridgeline", "models", "--json"],
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "RIDGELINE_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    rows = {row["name"]: row for row in json.loads(listed.stdout)["models"]}
    assert rows["org/m"]["path"] == path and rows["org/m"]["commit"] == COMMIT
    assert rows["org/m"]["family"] == "llama" and rows["org/m"]["disk_bytes"] > len(WEIGHTS)
    assert rows["demo"]["fits"] and rows["demo"]["num_params"] > 5e6


CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
UNPULLED = Repository(
    files={"config.json": json.dumps(CONFIG).encode(), "model.safetensors": WEIGHTS}
)


def run_ridgeline(
    hub: HubState, home: Path, *words: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """A command with an empty home, from this hub."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "RIDGELINE_"))}
    places = {"HF_HOME": str(home / "hf"), "RIDGELINE_CACHE": str(home / "ridgeline")}
    return subprocess.run(
        [sys.executable, "-m", "ridgeline", *words],
        env={**kept, **places, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_inspect_and_predict_read_only_the_config_of_an_unpulled_model(tmp_path: Path) -> None:
    with loopback_hub(org__m=UNPULLED) as hub:
        inspected = run_ridgeline(hub, tmp_path, "inspect", "org/m")
        assert inspected.returncode == 0, inspected.stderr
        assert "only config.json was read; ridgeline pull org/m" in inspected.stdout
        lengths = ("--accelerator", "h100-sxm", "--input-len", "20", "--output-len", "8")
        predicted = run_ridgeline(hub, tmp_path, "predict", "org/m", *lengths)
        assert predicted.returncode == 0, predicted.stderr
        assert not hub.downloads(), "weights were downloaded"
    offline = run_ridgeline(hub, tmp_path, "inspect", "org/m", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, "config.json is in the cache"
    refused = run_ridgeline(hub, tmp_path / "empty", "inspect", "org/m", HF_HUB_OFFLINE="1")
    failed(refused, "not in the cache", "HF_HUB_OFFLINE")
    gone = run_ridgeline(hub, tmp_path / "empty", "inspect", "org/m")
    failed(gone, "the download of org/m failed", hub.url, "check the network")


def test_a_repository_without_config_is_not_planned(tmp_path: Path) -> None:
    with loopback_hub(org__g=GGUF) as hub:
        done = run_ridgeline(hub, tmp_path, "inspect", "org/g")
        failed(done, "org/g has no config.json", "ridgeline pull org/g")
