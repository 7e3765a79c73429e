"""A model opens without flags, in every command that opens one, on a machine with 20 GiB free."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.config.improve import OptimizeOptions
from ridgeline.config.settings import Settings
from ridgeline.engine import config
from ridgeline.engine import engine as engine_module
from ridgeline.engine.config import ResolvedSettings
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.measure.workload import parse_workload
from ridgeline.workflows.load.tokenized_workload import TokenizedWorkload, sample_requests
from ridgeline.workflows.optimize.optimize import prepare_search

GIB = 2**30
MODELS = (
    *("dummy:qwen2.5-0.5b", "dummy:qwen2.5-1.5b", "dummy:qwen2.5-7b"),
    *("dummy:qwen3-0.6b", "dummy:qwen3-1.7b", "dummy:qwen3-4b"),
    *("dummy:llama-3.2-1b", "dummy:llama-3.2-3b", "dummy:llama-3.1-8b"),
    *("dummy:gemma-3-1b", "dummy:gemma-3-4b", "dummy:phi-4-mini", "dummy:mistral-7b"),
    *("dummy:smollm2-360m", "dummy:tinyllama-1.1b"),
)


class Opened(Exception):
    """Raised in place of making the weights."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ResolvedSettings]:
    """The configurations that were opened, with the memory of the machine of the name."""
    configurations: list[ResolvedSettings] = []

    def assemble(resolved: ResolvedSettings, clock: object) -> None:
        configurations.append(resolved)
        raise Opened

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RIDGELINE_PORT", "0")
    monkeypatch.setattr(config, "_memory", lambda device: (24 * GIB, 20 * GIB))
    monkeypatch.setattr(engine_module, "assemble", assemble)
    return configurations


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("command", ["serve", "generate", "bench"])
def test_model_opens_without_flags(
    command: str, model: str, opened: list[ResolvedSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["Hello"] if command == "generate" else []
    assert main([command, model, *prompt]) == 1
    assert "Opened" in capsys.readouterr().err
    (resolved,) = opened
    assert resolved.max_model_len >= 2048
    assert resolved.num_blocks * resolved.block_size >= resolved.max_model_len


@pytest.mark.parametrize("model", MODELS)
def test_model_is_optimised_without_flags(model: str, opened: list[ResolvedSettings]) -> None:
    """Its workload fits the context, and is one that the model can take."""
    settings = Settings(model=model)
    job, _ = prepare_search(settings, OptimizeOptions(), None)
    workload = TokenizedWorkload(parse_workload(job.workload), load_tokenizer(model))
    assert sample_requests(workload, config.resolve(job.settings).max_model_len)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_model_is_explained_without_flags(
    model: str, opened: list[ResolvedSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", model]) == 0
    assert "max_model_len" in capsys.readouterr().out
    assert not opened, "no weights are needed"


def test_replaced_workload_is_named(
    opened: list[ResolvedSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    """A shape with random weights has no tokenizer for the texts of the default workload."""
    assert main(["bench", "dummy:qwen3-0.6b"]) == 1
    assert "--workload synthetic:input=512,output=128" in capsys.readouterr().err
