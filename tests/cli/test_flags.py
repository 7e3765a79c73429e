"""Engine flags: one per setting, the same everywhere, over a configuration file."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import msgspec
import pytest

from ridgeline.cli import app as commands
from ridgeline.cli.main import main
from ridgeline.cli.params.engine import HELP, EngineFlags, takes_engine_flags
from ridgeline.cli.params.units import count_of, duration_of, size_of
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput


def test_every_setting_has_a_flag_with_help() -> None:
    names = {field.name for field in msgspec.structs.fields(Settings)} - {"model"}
    assert set(HELP) == names


@pytest.mark.parametrize("command", [commands.serve, commands.generate])
def test_commands_share_the_flags(command: object) -> None:
    parameters = inspect.signature(command).parameters  # type: ignore[arg-type]
    assert set(HELP) | {"config"} <= set(parameters) and "engine" not in parameters


def seen(*args: str) -> Settings:
    """The settings that a command with these arguments gets."""
    import typer

    found: list[Settings] = []
    app = typer.Typer()

    @app.command()
    @takes_engine_flags
    def run(model: str, *, engine: EngineFlags) -> None:
        found.append(engine.settings(model))

    app(["demo", *args], standalone_mode=False)
    return found[0]


def test_no_flag_is_the_default() -> None:
    assert seen() == Settings()


def test_every_kind_of_flag() -> None:
    settings = seen(
        "--max-model-len", "4k", "--kv-cache-memory-bytes", "512MiB", "--no-enable-prefix-caching",
        "--quantization", "int8", "--batch-wait-ms", "2.5", "--seed", "3", "--batching", "static",
    )  # fmt: skip
    assert settings == Settings(
        max_model_len=4000,
        kv_cache_memory_bytes=512 << 20,
        enable_prefix_caching=False,
        quantization="int8",
        batch_wait_ms=2.5,
        seed=3,
        batching="static",
    )


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ridgeline.toml"
    file.write_text(
        '[engine]\nmodel = "other"\nmax_num_seqs = 4\nseed = 9\n[server]\nport = 1234\n'
    )
    settings, server = EngineFlags({"seed": 1}, file).resolve(None)
    assert (settings.model, settings.max_num_seqs, settings.seed) == ("other", 4, 1)
    assert server == {"port": 1234}
    assert EngineFlags({}, file).settings("mine").model == "mine"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[engine]\nmax_seqs = 1\n", "max_seqs"),
        ('[engine]\nmax_num_seqs = "four"\n', "max_num_seqs"),
        ("[motor]\n", "motor"),
        ("[engine\n", "TOML"),
        ("[engine]\nbatch_wait_ms = nan\n", "--batch-wait-ms"),
        ("[engine]\nprefix_cache_ttl_s = -1.0\n", "--prefix-cache-ttl-s"),
        ("[server]\nprot = 1\n", "prot"),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, named: str
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(content)
    assert main(["serve", "--config", str(file), "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert named in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1.5k", 1500),
        ("1m", 10**6),
        ("1G", 2**30),
        ("2GiB", 2**31),
        ("3GB", 3 * 10**9),
        ("512 MiB", 2**29),
    ],
)
def test_quantities(text: str, value: int) -> None:
    assert count_of("--x")(text) == size_of("--x")(text) == value


@pytest.mark.parametrize("text", ["", "k", "4x", "-1", "1e3", "nan", "4kk", "0.5"])
def test_bad_quantities_name_the_flag(text: str) -> None:
    with pytest.raises(BadInput, match="--x"):
        size_of("--x")(text)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--dtype", "int3"], "--dtype"),
        (["--batching", "magic"], "--batching"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-model-len", "lots"], "--max-model-len"),
        (["--batch-wait-ms", "-1"], "--batch-wait-ms"),
        (["--port", "70000"], "--port"),
    ],
)
def test_bad_flags_are_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], named: str
) -> None:
    assert main(["serve", "demo", *args]) == 2
    err = capsys.readouterr().err
    assert named in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("4m30s", 270), ("1.5h", 5400)]
)
def test_times(text: str, seconds: float) -> None:
    assert duration_of("--x")(text) == seconds


@pytest.mark.parametrize("text", ["", "5x", "0", "-5m", "m5", "nan"])
def test_bad_times_name_the_flag(text: str) -> None:
    with pytest.raises(BadInput, match="--x"):
        duration_of("--x")(text)


def test_explain_tells_each_default_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "demo", "--max-num-seqs", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["max_num_seqs"] == 3
    assert told["derivations"]["max_num_seqs"] == "as requested"
    assert set(HELP) <= set(told["settings"])
    assert main(["explain", "demo", "--quantization", "int8"]) == 0
    assert "int8" in capsys.readouterr().out
