"""What a model's name stands for, which files make up a model, and where a name finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.config.option import options_of
from ridgeline.config.tools import EnvironmentOptions
from ridgeline.engine.kernels.native_linear import ISA_VARIABLE
from ridgeline.errors import BadInput, DownloadFailed
from ridgeline.hub.names import HubModel, ModelUrl, parse_remote, served_name
from ridgeline.hub.repository_files import select_files
from ridgeline.modelspec.checkpoints.locate import local_path
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.families.shapes import shape_of_repository
from ridgeline.paths import CACHE_VARIABLE

URL = "https://host.example/a/m.Q4_0.gguf"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen/Qwen3-0.6B", HubModel(repo="Qwen/Qwen3-0.6B")),
        ("hf:o/r", HubModel(repo="o/r")),
        ("hf:o/r@refs/pr/3", HubModel(repo="o/r", revision="refs/pr/3")),
        ("o/r:Q4_K_M", HubModel(repo="o/r", quantization="Q4_K_M")),
        ("o/r@v1.0:UD-Q2_K", HubModel(repo="o/r", revision="v1.0", quantization="UD-Q2_K")),
        (URL, ModelUrl(url=URL)),
        (f"{URL}#sha256={'a' * 64}", ModelUrl(url=URL, sha256="a" * 64)),
    ],
)
def test_names_of_remote_models(name: str, model: object) -> None:
    parsed = parse_remote(name)
    assert parsed == model
    assert parse_remote(str(parsed)) == model  # as it is written into a ridgeline.toml


@pytest.mark.parametrize(
    "name",
    ["demo", "dummy:llama-3.1-8b", "llama-3.1-8b", "./a/b", "/a/b", "a/b/c", "a/m.gguf", "~/m"],
)
def test_names_of_local_models(name: str) -> None:
    assert parse_remote(name) is None


def test_a_directory_comes_before_a_repository_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "m").mkdir(parents=True)
    assert parse_remote("org/m") is None and local_path("org/m") == Path("org/m")
    assert parse_remote("hf:org/m") == HubModel(repo="org/m")


@pytest.mark.parametrize("name", ["hf:", "hf:onlyowner", "hf:a/b/c", "https://h/x.bin", f"{URL}#x"])
def test_malformed_names_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match="limit: h"):
        parse_remote(name)


def test_clients_know_a_model_by_its_repository() -> None:
    assert served_name("hf:Qwen/Qwen3-0.6B@main") == "Qwen/Qwen3-0.6B"
    assert served_name("o/r:Q4_0") == "o/r:Q4_0" and served_name(URL) == "m.Q4_0.gguf"
    assert served_name("smollm2") == "smollm2" and served_name("/models/mine/") == "mine"


def test_planning_knows_a_published_repository_without_a_download() -> None:
    assert load_planning_spec("Qwen/Qwen3-0.6B") == load_planning_spec("qwen3-0.6b")
    assert shape_of_repository("Qwen3-0.6B-Q4_K_M.gguf") == "qwen3-0.6b"
    with pytest.raises(DownloadFailed, match="ridgeline pull no-such/model"):
        load_planning_spec("no-such/model")


def test_weights_are_fetched_last() -> None:
    names = [
        "model.safetensors",
        "a.json",
        "merges.txt",
        "x.py",
        "additional_chat_templates/t.jinja",
    ]
    selected = select_files(names, HubModel(repo="o/r"))
    assert selected[-1] == "model.safetensors" and set(selected) == {*names} - {"x.py"}


def test_the_option_table_names_the_variables_that_the_code_reads() -> None:
    rows = options_of(EnvironmentOptions)
    assert rows["cache"].env == CACHE_VARIABLE
    assert rows["native_isa"].env == ISA_VARIABLE
