"""Every command that prints a result has --json, and then stdout is one JSON value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.commands import quantize, shrink, train_drafter
from ridgeline.cli.commands.run import models
from ridgeline.cli.main import main
from ridgeline.config.commands import COMMANDS
from ridgeline.records import Usage
from ridgeline.workflows.quantize.quantize import QuantizeResult
from ridgeline.workflows.shrink.distill import DistillResult
from ridgeline.workflows.shrink.prune import PruneResult
from ridgeline.workflows.text import generation
from ridgeline.workflows.text.transcript import Reply
from ridgeline.workflows.train_drafter import DrafterTraining
from tests.cli.test_json_line import strictly
from tests.serve.batch.helpers import jsonl, request

NO_RESULT = {
    "serve": "runs until it is stopped",
    "route": "runs until it is stopped",
    "mock-server": "runs until it is stopped",
    "twin": "runs until it is stopped",
    "chat": "is a conversation; /save writes it",
    "completion": "prints a script for a shell",
}
"""Command → why it has no --json."""

PRUNED = PruneResult(
    model="demo",
    output="made",
    dropped_layers=(1,),
    num_channels=(4, 3),
    num_kv_heads=(2, 2),
    num_params=(10, 9),
    num_bytes=(20, 18),
    perplexity=(3.0, 4.0),
    layers=(),
    is_smaller=True,
    seconds=1.0,
)
DISTILLED = DistillResult(
    teacher="demo", student="demo", output="made", num_tokens=5, curve=(), models=(), seconds=1.0
)
QUANTIZED = QuantizeResult(
    model="demo",
    path="made",
    output="made",
    method="gptq",
    written_bytes=5,
    memory_bytes=6.0,
    seconds=1.0,
)
DRAFTER = DrafterTraining(
    model="demo",
    output="made",
    kind="medusa",
    num_bytes=5,
    num_tokens=6,
    acceptance=(0.5,),
    seconds=1.0,
)


def printed(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> Any:
    assert main([*args, "--json"]) == code
    return strictly(capsys.readouterr().out)


def test_every_command_with_a_result_has_json() -> None:
    without = {name for name, command in COMMANDS.items() if "json" not in command.options}
    assert without == set(NO_RESULT)


@pytest.mark.usefixtures("no_work")
def test_small_commands_print_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(printed(capsys, "version")) == {"version"}
    assert set(printed(capsys, "new-key", "alice")) == {"key", "entry"}
    assert printed(capsys, "operate", "dashboards") == {"files": ["operate/ridgeline.json"]}
    files = printed(capsys, "deploy", "--for", "compose")["files"]
    assert all(Path(file).is_file() for file in files)


def test_pull_prints_the_pinned_name_and_the_path(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "download", lambda model, observer: Path("/models/x"))
    monkeypatch.setattr(models, "pinned_name", lambda name: f"{name}@1")
    assert printed(capsys, "pull", "owner/x") == {"model": "owner/x@1", "path": "/models/x"}


@pytest.mark.parametrize(
    ("module", "function", "args", "result"),
    [
        (quantize, "quantize_model", ["quantize", "demo"], QUANTIZED),
        (shrink, "prune_model", ["prune", "demo", "--drop-layers", "1"], PRUNED),
        (train_drafter, "train", ["train-drafter", "demo"], DRAFTER),
        (shrink.distillation, "distill",
         ["distill", "--teacher", "demo", "--student", "demo"], DISTILLED),
    ],
    ids=["quantize", "prune", "train-drafter", "distill"],
)  # fmt: skip
def test_commands_that_make_a_model_print_their_record(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    module: Any,
    function: str,
    args: list[str],
    result: Any,
) -> None:
    monkeypatch.setattr(module, function, lambda *given: result)
    found = printed(capsys, *args, "-o", str(tmp_path / "made"))
    assert found == result.to_dict()


def test_generate_prints_one_record_and_no_pieces(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answer:
        reply = Reply(
            text="hello",
            finish_reason="stop",
            usage=Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=2),
            ttft_s=0.1,
            decode_s=0.1,
        )

        def __enter__(self) -> Answer:
            return self

        def __exit__(self, *exc: object) -> None:
            pass

        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from ("hel", "lo")

    monkeypatch.setattr(generation, "open_stream", lambda *args: Answer())
    assert printed(capsys, "generate", "demo", "x")["text"] == "hello"


@pytest.mark.slow
def test_batch_prints_its_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl(request("a")))
    args = ["batch", str(file), "-o", str(tmp_path / "out"), "--served-model-name", "fake"]
    counts = printed(capsys, *args, "--model", "demo", "--kv-cache-memory-bytes", "32MiB")
    assert (counts["total"], counts["completed"], counts["errors"]) == (1, 1, None)
