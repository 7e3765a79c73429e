"""The option table: what an option is called, how its value is written, where it comes from."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import main
from ridgeline.cli.params.click_command import OptionCommand
from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.commands import COMMANDS, TABLES, Command
from ridgeline.config.improve import CheckpointFormat
from ridgeline.config.option import Option, options_of
from ridgeline.config.server import ServerOptions
from ridgeline.config.settings import Settings, Speculative
from ridgeline.config.sources import read_config, section_from
from ridgeline.config.tools import GenerateOptions
from ridgeline.config.units import parse_count, parse_duration
from ridgeline.errors import BadInput
from ridgeline.records import Slo
from tests.cli.command_line import options


def read(*args: str, command: str = "serve") -> Invocation:
    """What the command would be called with."""
    calls: list[Invocation] = []
    OptionCommand(COMMANDS[command], calls.append).main(list(args), standalone_mode=False)
    return calls[0]


def test_every_option_has_a_help_text_that_is_a_sentence() -> None:
    for command, option in options():
        assert option.about.help.endswith("."), f"{command} {option.flag}"


def test_every_command_has_a_summary_of_one_line_and_an_example() -> None:
    for command in COMMANDS.values():
        assert len(command.summary) <= 62 and command.summary.endswith("."), command.name
        assert command.examples or command.name == "version"


def test_option_names_are_unique_within_a_command() -> None:
    for command in COMMANDS.values():
        rows = [
            option
            for section in command.all_sections
            for option in options_of(section).values()
            if option.on_command_line
        ]
        flags = Counter(option.flag for option in rows if option.has_flag)
        flags += Counter(option.name for option in rows)
        assert all(count == 1 for count in flags.values()), (command.name, flags.most_common(1))


def test_environment_variables_are_unique() -> None:
    owners: dict[str, set[str]] = {}
    for section in {*TABLES.values()}:
        for option in options_of(section).values():
            if option.env and option.about.env is None:
                owners.setdefault(option.env, set()).add(section.__name__)
    assert all(len(names) == 1 for names in owners.values())
    assert options_of(Settings)["max_num_seqs"].env == "RIDGELINE_MAX_NUM_SEQS"
    assert options_of(GenerateOptions)["max_tokens"].env == "RIDGELINE_GENERATE_MAX_TOKENS"


def test_equal_flags_mean_the_same_kind_of_value() -> None:
    """One name per idea: a name has one type, whichever command takes it."""
    kinds: dict[str, set[str]] = {}
    for _, option in options():
        if option.has_flag:
            kinds.setdefault(option.flag, set()).add(kind_of(option))
    mixed = {flag: found for flag, found in kinds.items() if len(found) > 1}
    assert not mixed


def kind_of(option: Option) -> str:
    unit = option.about.unit
    if unit is not None:
        return unit.metavar
    return "text" if option.type in (str, Slo) else str(option.type)


def test_without_flags_settings_have_their_defaults() -> None:
    call = read()
    assert call.read(Settings) == Settings() and call.read(ServerOptions) == ServerOptions()


def test_every_kind_of_value_is_read() -> None:
    settings = read(
        "--max-model-len", "4k", "--kv-cache-memory-bytes", "512MiB", "--no-enable-prefix-caching",
        "--quantization", "int8", "--batch-wait-ms", "2.5", "--seed", "3", "--batching", "static",
        "--prefix-cache-ttl-s", "5m", "--speculative-config", '{"method": "ngram"}',
    ).read(Settings)  # fmt: skip
    assert settings == Settings(
        max_model_len=4000,
        kv_cache_memory_bytes=512 << 20,
        enable_prefix_caching=False,
        quantization="int8",
        batch_wait_ms=2.5,
        seed=3,
        batching="static",
        prefix_cache_ttl_s=300.0,
        speculative_config=Speculative(method="ngram"),
    )


def test_the_command_line_overrides_the_environment_and_that_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ridgeline.toml"
    file.write_text(
        '[engine]\nmodel = "other"\nmax_num_seqs = 4\nseed = 9\nblock_size = 8\n'
        "[server]\nport = 1234\n[provenance]\nmachine = 1\n"
    )
    monkeypatch.setenv("RIDGELINE_SEED", "5")
    monkeypatch.setenv("RIDGELINE_MAX_NUM_SEQS", "1k")
    monkeypatch.setenv("RIDGELINE_PORT", "")
    call = read("--seed", "1", "--config", str(file))
    settings = call.settings(None)
    assert (settings.model, settings.max_num_seqs, settings.seed) == ("other", 1000, 1)
    assert (settings.block_size, call.read(ServerOptions).port) == (8, 1234)
    assert call.settings("mine").model == "mine"
    assert call.is_given("port") and not call.is_given("host")


def test_an_environment_variable_is_named_in_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RIDGELINE_MAX_NUM_SEQS", "lots")
    assert main(["serve", "demo"]) == 2
    assert "RIDGELINE_MAX_NUM_SEQS must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[engine]\nmax_seqs = 1\n", "max_seqs"),
        ('[engine]\nmax_num_seqs = "four"\n', "max_num_seqs"),
        ("[engine]\nmax_num_seqs = true\n", "max_num_seqs"),
        ("[engine]\nenable_prefix_caching = 3\n", "enable_prefix_caching"),
        ('[engine]\nbatching = "magic"\n', "batching"),
        ("[motor]\n", "motor"),
        ("engine = 3\n", "engine"),
        ("[engine\n", "TOML"),
        ("[engine]\nbatch_wait_ms = nan\n", "batch_wait_ms"),
        ("[engine]\nmax_num_seqs = inf\n", "max_num_seqs"),
        ("[engine]\nprefix_cache_ttl_s = -1.0\n", "prefix_cache_ttl_s"),
        ("[server]\nprot = 1\n", "did you mean port?"),
        ("[server]\nport = 70000\n", "port"),
        ('[server]\nport = "x"\n', "port"),
    ],
)
def test_a_mistake_in_the_file_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, named: str
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(content)
    assert main(["serve", "--config", str(file), "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert named in err and len(err.splitlines()) == 1


def test_a_file_takes_quantities_as_the_command_line_does(tmp_path: Path) -> None:
    file = tmp_path / "ridgeline.toml"
    file.write_text('[engine]\nkv_cache_memory_bytes = "1G"\n[load]\nslo = "ttft:200"\n')
    tables = read_config(file)
    assert tables["engine"] == {"kv_cache_memory_bytes": 1 << 30}
    assert tables["load"]["slo"].ttft_s == 0.2


def test_a_program_may_write_quantities_as_text() -> None:
    assert section_from(Settings, {"max_model_len": "8k", "seed": 3}).max_model_len == 8000
    with pytest.raises(BadInput, match="max_seqs"):
        section_from(Settings, {"max_seqs": 8})


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
def test_counts_and_sizes_take_suffixes(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "k", "4x", "1e3", "nan", "4kk", "0.5"])
def test_malformed_counts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_count(text)
    with pytest.raises(BadInput, match="--max-num-seqs must be a whole number"):
        options_of(Settings)["max_num_seqs"].read(text, "--max-num-seqs")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("5m", 300), ("4m30s", 270), ("1.5h", 5400), ("250ms", 0.25)],
)
def test_durations_take_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5x", "0", "-5m", "m5", "nan"])
def test_malformed_durations_are_refused(text: str) -> None:
    option = COMMANDS["optimize"].options["budget"]
    with pytest.raises(BadInput, match="--budget"):
        option.read(text, option.flag)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--dtype", "int3"], "--dtype"),
        (["--batching", "magic"], "--batching"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-model-len", "lots"], "--max-model-len"),
        (["--batch-wait-ms", "-1"], "--batch-wait-ms"),
        (["--port", "70000"], "--port"),
        (["--speculative-config", "ngram"], "--speculative-config"),
        (["--speculative-config", '["ngram"]'], "--speculative-config"),
        (["--speculative-config", '{"methods": 1}'], "--speculative-config"),
    ],
)
def test_a_bad_flag_is_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], named: str
) -> None:
    assert main(["serve", "demo", *args]) == 2
    err = capsys.readouterr().err
    assert named in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("joined", [True, False])
def test_an_slo_may_be_several_words(joined: bool) -> None:
    """As vLLM's --goodput; a model's name with a colon is not part of it."""
    first = ["--slo=ttft:200"] if joined else ["--slo", "ttft:200"]
    call = read(*first, "tpot:50", "e2el:900", "dummy:llama-1b-32k", "--seed", "1", command="bench")
    assert str(call.values["slo"]).startswith("ttft:200 tpot:50 e2e:900")
    assert (call.values["model"], call.values["seed"]) == ("dummy:llama-1b-32k", 1)


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        ("bench", "--random-input-len", "--input-len"),
        ("bench", "--goodput", "--slo"),
        ("plan", "--isl", "--input-len"),
        ("simulate", "--rate", "--request-rate"),
        ("cost", "--prefix", "--prefix-len"),
        ("predict", "--batch", "--max-concurrency"),
        ("predict", "--tp", "--tensor-parallel-size"),
        ("plan", "--device", "--accelerator"),
        ("plan", "--weight-dtype", "--quantization"),
    ],
)
@pytest.mark.parametrize("joined", [True, False])
def test_old_flag_is_refused_with_the_present_one(
    capsys: pytest.CaptureFixture[str], command: str, old: str, new: str, joined: bool
) -> None:
    assert main([command, *([f"{old}=4"] if joined else [old, "4"])]) == 2
    err = capsys.readouterr().err
    assert f"{old} is called {new} here" in err and f"use {new}" in err


def test_checkpoint_formats_are_those_that_can_be_written() -> None:
    from typing import get_args

    from ridgeline.workflows.quantize.quantize import FORMATS

    assert set(get_args(CheckpointFormat)) == set(FORMATS)


def test_required_options_are_named_when_missing(capsys: pytest.CaptureFixture[str]) -> None:
    for args, named in (
        (["quantize", "demo"], "quantize needs --output FOLDER"),
        (["inspect"], "inspect needs MODEL"),
        (["compare", "a"], "compare needs B"),
    ):
        assert main(args) == 2
        assert named in capsys.readouterr().err


@pytest.mark.slow
def test_explain_shows_each_default_and_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "demo", "--max-num-seqs", "3", "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["settings"]["max_num_seqs"] == 3
    assert answer["derivations"]["max_num_seqs"] == "as requested"
    assert set(options_of(Settings)) <= set(answer["settings"])
    assert main(["explain", "demo", "--quantization", "int8"]) == 0
    assert "int8" in capsys.readouterr().out


def test_all_sections_of_a_command_are_described() -> None:
    for command in COMMANDS.values():
        assert isinstance(command, Command)
        for section in command.sections:
            assert section.__doc__ and len(section.__doc__) > 10
