"""Command lines of other servers are read by the rules of the libraries that read them there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.config.server import TwinServerOptions
from ridgeline.errors import BadInput
from ridgeline.optimize.drivers.log_errors import last_error
from ridgeline.optimize.drivers.server_process import ServerCommand
from ridgeline.optimize.external.server_flags import DEPTH, load_server_flags
from ridgeline.optimize.external.server_rungs import server_rungs
from ridgeline.optimize.server_settings import FLAGS
from ridgeline.records.progress import Message
from ridgeline.twin.servers.command_line import (
    ServerLine,
    as_read,
    find_command,
    read_command,
    server_kinds,
)
from ridgeline.twin.servers.flag_table import flag_tables
from ridgeline.twin.servers.refusal import CommandRefused
from ridgeline.workflows.optimize.restartable_server import server_recipe
from ridgeline.workflows.optimize.server_driver import RestartableServer
from ridgeline.workflows.serving import twin_of_server
from ridgeline.workflows.serving.twin_of_server import run_twin

COMMANDS = {
    "vllm": "vllm serve m",
    "sglang": "sglang serve --model-path m",
    "trtllm": "trtllm-serve serve m",
    "tgi": "text-generation-launcher --model-id m",
    "llama-server": "llama-server -m m",
}
CLICK = "Usage: trtllm-serve serve [OPTIONS] MODEL\nTry 'trtllm-serve serve --help' for help.\n\n"
CLAP = "\n\nUsage: text-generation-launcher [OPTIONS]\n\nFor more information, try '--help'."


def line_of(server: str, flags: str) -> ServerLine:
    return read_command(f"{COMMANDS[server]} {flags}")[1]


def refused(server: str, flags: str) -> CommandRefused:
    """What the server says of its flags."""
    with pytest.raises(CommandRefused) as found:
        kind, line = read_command(f"{COMMANDS[server]} {flags}")
        if line.unrecognized:
            raise kind.refuse(line)
    return found.value


@pytest.mark.parametrize(
    ("server", "flags", "code", "says"),
    [
        (
            "vllm",
            "--bogus 3 --no-such",
            2,
            "vllm: error: unrecognized arguments: --bogus 3 --no-such",
        ),
        ("vllm", "--swap-space=4", 2, "vllm: error: unrecognized arguments: --swap-space=4"),
        ("vllm", "other-model", 2, "vllm: error: unrecognized arguments: other-model"),
        ("vllm", "--model other-model", 2, "vllm: error: unrecognized arguments: m"),
        (
            "sglang",
            "--enable_metrics",
            2,
            "sglang serve: error: unrecognized arguments: --enable_metrics",
        ),
        ("trtllm", "--zzz 3", 2, f"{CLICK}Error: No such option: --zzz"),
        (
            "trtllm",
            "--log_levels 3",
            2,
            f"{CLICK}Error: No such option: --log_levels Did you mean --log_level?",
        ),
        (
            "trtllm",
            "--max-batch-size 3",
            2,
            "Error: No such option: --max-batch-size Did you mean --max_batch_size?",
        ),
        ("trtllm", "extra", 2, f"{CLICK}Error: Got unexpected extra argument (extra)"),
        (
            "tgi",
            "--max-batch-sizes 3",
            2,
            "error: unexpected argument '--max-batch-sizes' found\n\n"
            f"  tip: a similar argument exists: '--max-batch-size'{CLAP}",
        ),
        ("llama-server", "--bogus 3", 1, "error: invalid argument: --bogus"),
        ("llama-server", "--ctx-size=4096", 1, "error: invalid argument: --ctx-size=4096"),
        ("llama-server", "--ctx-siz 4096", 1, "error: invalid argument: --ctx-siz"),
    ],
)
def test_unknown_flag_is_refused_as_by_the_server(
    server: str, flags: str, code: int, says: str
) -> None:
    error = refused(server, flags)
    assert error.exit_code == code
    assert says in error.log
    verdict = last_error(error.log)
    assert verdict and verdict in says.splitlines(), "what a trial's verdict quotes"


@pytest.mark.parametrize(
    ("server", "flags", "says"),
    [
        ("vllm", "--port", "argument --port: expected one argument"),
        ("vllm", "--port --max-num-seqs 4", "argument --port: expected one argument"),
        ("vllm", "--api-key --port 1", "argument --api-key: expected at least one argument"),
        ("vllm", "--max-num-seqs many", "argument --max-num-seqs: invalid int value: 'many'"),
        ("vllm", "--enforce-eager=1", "ignored explicit argument '1'"),
        ("vllm", "--max-num-b 1 --max-num 4", "ambiguous option: --max-num could match "),
        ("sglang", "--mem-fraction-static x", "invalid float value: 'x'"),
        ("trtllm", "--max_batch_size", "Option '--max_batch_size' requires an argument."),
        (
            "trtllm",
            "--max_batch_size x",
            "Invalid value for '--max_batch_size': 'x' is not a valid",
        ),
        ("trtllm", "--trust_remote_code=1", "Option '--trust_remote_code' does not take a value."),
        ("tgi", "--max-batch-size", "a value is required for '--max-batch-size <MAX_BATCH_SIZE>'"),
        ("tgi", "--num-shard 2 --num-shard 4", "cannot be used multiple times"),
        ("tgi", "-p 1 --port 2", "the argument '--port <PORT>' cannot be used multiple times"),
        ("tgi", "-p", "a value is required for '--port <PORT>' but none was supplied"),
        ("tgi", "--env -e", "error: the argument '--env' cannot be used multiple times\n"),
        ("tgi", "--num-shard=-1", "'-1' for '--num-shard <NUM_SHARD>': invalid digit"),
        ("tgi", "--num-shard 1_0", "invalid value '1_0' for '--num-shard <NUM_SHARD>'"),
        ("vllm", "--tensor-parallel-size 2.0", "invalid int value: '2.0'"),
        ("vllm", "--max-num-seqs 8k", "argument --max-num-seqs: invalid int value: '8k'"),
        ("vllm", "--max-model-len 8KiB", "argument --max-model-len: invalid int value: '8KiB'"),
        ("vllm", "--chat-template '--port=4 5'", "--chat-template: expected one argument"),
        ("tgi", "--num-shard x", "invalid value 'x' for '--num-shard <NUM_SHARD>': invalid digit"),
        (
            "llama-server",
            "--parallel",
            'handling argument "--parallel": expected value for argument',
        ),
        ("llama-server", "-np x", 'error while handling argument "-np": stoi'),
        ("llama-server", "-np 3000000000", 'error while handling argument "-np": stoi'),
        (
            "llama-server",
            "--draft_max 8",
            'error while handling argument "--draft-max": the argument has been removed. '
            "use --spec-draft-n-max or --spec-ngram-mod-n-max\n",
        ),
        (
            "llama-server",
            "--spec-ngram-size-m 8",
            "the argument has been removed. use the respective --spec-ngram-*-size-m\n",
        ),
        ("llama-server", "--draft x", 'error while handling argument "--draft": stoi'),
    ],
)
def test_flag_that_is_used_wrongly_is_refused_as_by_the_server(
    server: str, flags: str, says: str
) -> None:
    assert says in refused(server, flags).log


@pytest.mark.parametrize(
    ("server", "flags", "field", "value"),
    [
        ("vllm", "--max_num_seqs 4", "max_num_seqs", 4),
        ("vllm", "--max-num-seq=4", "max_num_seqs", 4),
        ("vllm", "--max-model-len 8k", "max_model_len", 8000),
        ("vllm", "--max-model-len 8K", "max_model_len", 8192),
        ("vllm", "--max-model-len auto", "max_model_len", None),
        ("vllm", "--max-model-len -1", "max_model_len", None),
        ("vllm", "-tp=2", "tp", 2),
        ("vllm", "-O3", "compile_level", 3),
        ("vllm", "-O=1", "compile_level", 1),
        ("vllm", "-qfp8", "quantization", "fp8"),
        ("vllm", "--served-model-name a b --port 1", "served_model_name", "a"),
        ("vllm", "--no-enforce-eager", "graphs", True),
        ("vllm", "-ep", "expert_parallel", True),
        ("sglang", "--mem-fraction-s 0.5", "memory_share", 0.5),
        ("sglang", "--ep 2", "ep", 2),
        ("trtllm", "--max_num_tokens=5", "max_num_batched_tokens", 5),
        ("tgi", "-p8080", "port", 8080),
        ("llama-server", "--ctx_size 4096", "max_model_len", 4096),
        ("llama-server", "-np 2 -np 3", "max_num_seqs", 3),
        ("llama-server", "-c 4096.0", "max_model_len", 4096),
        ("llama-server", "-np 8x", "max_num_seqs", 8),
        ("sglang", "--max-running-requests 1_000", "max_num_seqs", 1000),
        ("vllm", "--max-num-seqs ' 1_000'", "max_num_seqs", 1000),
        ("vllm", "--max-num-batched-tokens 1_000", "max_num_batched_tokens", 1000),
        ("vllm", "--chat-template '-a b' --port 7", "port", 7),
        ("vllm", "--served-model-name '--port 5'", "served_model_name", "--port 5"),
        ("vllm", "--served-model-name '-a b' c", "served_model_name", "-a b"),
        ("tgi", "--cuda-graphs 1 --cuda-graphs 2 --num-shard 2", "tp", 2),
        ("tgi", "--cors-allow-origin a --cors-allow-origin b", "model", "m"),
    ],
)
def test_spellings_that_the_server_takes(
    server: str, flags: str, field: str, value: object
) -> None:
    line = line_of(server, flags)
    assert getattr(line, field) == value
    assert not line.unrecognized


def test_keys_of_a_json_flag_are_given_one_by_one() -> None:
    flags = (
        "--speculative-config.method ngram --speculative_config.num_speculative_tokens=5 "
        "--compilation-config.pass_config.fuse true --compilation-config.sizes+ 1,2"
    )
    line = line_of("vllm", flags)
    assert json.loads(line.speculation) == {"method": "ngram", "num_speculative_tokens": 5}
    assert line.num_draft_tokens == 5
    assert line.unknown == ("--compilation-config",)


def test_switch_before_the_model_does_not_take_it_for_a_value() -> None:
    _, line = read_command("vllm serve --disable-log-stats llama-3.1-8b")
    assert line.model == "llama-3.1-8b"


def test_word_after_an_unknown_flag_is_the_model_where_no_other_is() -> None:
    kind, line = read_command("vllm serve --new-switch m")
    assert (line.model, line.unrecognized) == ("m", ("--new-switch",))
    assert last_error(kind.refuse(line).log) == "vllm: error: unrecognized arguments: --new-switch"
    _, line = read_command("vllm serve --new-flag 3 m")
    assert (line.model, line.unrecognized) == ("m", ("--new-flag", "3"))
    with pytest.raises(BadInput, match="names no model"):
        read_command("text-generation-launcher --new-flag m")


def test_words_after_two_dashes_are_none_of_a_flag() -> None:
    _, line = read_command("vllm serve --port 7 -- m")
    assert (line.model, line.port, line.unrecognized) == ("m", 7, ())
    _, line = read_command("vllm serve --served-model-name a -- m --port")
    assert (line.model, line.unrecognized) == ("m", ("--port",))
    assert "error: invalid argument: --" in refused("llama-server", "-- m").log


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve m --config {file}",
        "vllm serve --config {file} m",
        "vllm serve --config {file} --port 7 m",
        "vllm serve --config {file} --model m",
        "vllm serve --config {file} -- m",
        "sglang serve m --config {file}",
        "sglang serve --config {file} --model m",
    ],
)
def test_model_of_the_words_precedes_that_of_the_file(tmp_path: Path, command: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: other\nserved-model-name: a\n")
    _, line = read_command(command.format(file=file))
    assert (line.model, line.served_model_name, line.unrecognized) == ("m", "a", ())
    without = f"{command.split()[0]} serve --config {file}"
    assert read_command(without)[1].model == "other"


@pytest.mark.parametrize(
    "value", ["{since: 2026-01-02}", "&a {again: *a}", "{2026-01-02: 1}", "&a {b: [*a]}"]
)
def test_value_that_no_flag_takes_names_its_file(tmp_path: Path, value: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"port: 7\nspeculative-config: {value}\n")
    command = f"vllm serve m --config {file}"
    with pytest.raises(BadInput, match=f"speculative-config in {file} cannot be passed on as JSON"):
        read_command(command)
    assert find_command(command) is None
    assert as_read(command) == command


def test_flags_of_a_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "max-num-seqs: 7\nmax_num_batched_tokens: 4096\nenable-prefix-caching: false\n"
        "enforce-eager: true\nserved-model-name: [a, b]\nspeculative-config: {method: ngram}\n"
    )
    line = line_of("vllm", f"--config {file} --max-num-batched-tokens 1024")
    assert (line.max_num_seqs, line.max_num_batched_tokens) == (7, 1024)
    assert not line.prefix_caching and not line.graphs
    assert (line.served_model_name, line.num_draft_tokens) == ("a", 3)
    assert not line.unrecognized
    _, line = read_command(f"sglang serve --model-path m --config {tmp_path / 'none.yaml'}")
    assert line.unknown == ("--config",)


def test_every_flag_with_an_effect_is_one_of_the_server() -> None:
    for name, kind in server_kinds().items():
        takes = flag_tables()[name].takes
        assert set(kind.switches) | set(kind.flags) | set(kind.model) - {""} <= set(takes), name
        assert all(takes[flag] == "nothing" for flag in kind.switches), name
        assert all(takes[flag] in ("one", "any number") for flag in kind.flags), name


VALUES = {"max_num_seqs": "7", "tp": "2", "ep": "2", "quantization": "fp8", "model": "other"}


@pytest.mark.parametrize("server", COMMANDS)
def test_short_spellings_have_the_effect_of_the_long_ones(server: str) -> None:
    kind = server_kinds()[server]
    takes = kind.table.takes
    for short, long in load_server_flags()[server].aliases.items():
        name, _, value = long.partition("=")
        if name not in kind.flags and name not in kind.switches:
            continue
        value = value or VALUES.get(
            kind.flags.get(name, ""), "3" if takes[name] != "nothing" else ""
        )
        short_value = "" if "=" in long else value
        given = line_of(server, f"{short} {short_value}"), line_of(server, f"{name} {value}")
        assert given[0] == given[1], short
        if value:
            assert short == "-O2" or given[0] != line_of(server, ""), short


@pytest.mark.parametrize("server", COMMANDS)
def test_server_understands_every_change_of_its_rungs(server: str) -> None:
    command = ServerCommand(url="http://localhost", command=f"{COMMANDS[server]} {{flags}}")
    spelt = [
        shlex.split(text.replace("{value}", "8").replace(DEPTH, "4"))
        for table in load_server_flags()[server].flags.values()
        for text in ([table] if isinstance(table, str) else table.values())
    ]
    for rung in server_rungs(server):
        for changes in (rung.changes, *rung.variants):
            pairs = changes.get(FLAGS, {}).items()
            spelt.append([word for pair in pairs for word in pair if word])
    assert len(spelt) > 8
    for words in spelt:
        _, line = read_command(command.text(words))
        assert not line.unrecognized, words


def test_command_line_is_refused_before_the_twin_starts() -> None:
    lines: list[str] = []

    def note(event: object) -> None:
        assert isinstance(event, Message)
        lines.append(event.text)

    code = run_twin(TwinServerOptions(command="vllm serve llama-3.1-8b --bogus"), observer=note)
    assert code == 2
    assert last_error("\n".join(lines)) == "vllm: error: unrecognized arguments: --bogus"
    assert "--ignore-unknown-flags" in lines[0] and "0.33.0" in lines[0]


def test_unknown_flags_of_another_version_can_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerLine] = []
    monkeypatch.setattr(
        twin_of_server, "_serve", lambda kind, line, options, observer: served.append(line)
    )
    words = shlex.split("vllm serve llama-3.1-8b --bogus 3 --max-num-seqs 5")
    assert main(["twin", *words]) == 2
    assert main(["twin", "--ignore-unknown-flags", *words]) == 0
    [line] = served
    assert (line.max_num_seqs, line.unrecognized) == (5, ("--bogus", "3"))


def test_optimizer_reads_other_spellings_of_flags() -> None:
    flags = load_server_flags()["vllm"]
    command = flags.spell_out("vllm serve m_1 --max_num_seqs=2 --max-model-len 8k -tp 2 {flags}")
    assert command == (
        "vllm serve m_1 --max-num-seqs=2 --max-model-len 8k --tensor-parallel-size 2 {flags}"
    )
    given = flags.given(command)
    assert (given["max_num_seqs"], given["max_model_len"]) == (2, 8000)
    kept = "sglang serve --max_running_requests 2"
    assert load_server_flags()["sglang"].spell_out(kept) == kept, "SGLang refuses it"


def test_long_spellings_leave_quoted_words_as_they_are() -> None:
    spell_out = load_server_flags()["vllm"].spell_out
    quoted = """vllm serve m --chat-template 'a --foo_bar -tp b' --revision "x \\" --foo_bar" """
    assert spell_out(quoted) == quoted
    inside = "bash -c 'vllm serve m --max_num_seqs 2 -tp 2 {flags}'"
    spelt = "bash -c 'vllm serve m --max-num-seqs 2 --tensor-parallel-size 2 {flags}'"
    assert spell_out(inside) == spelt


@pytest.mark.parametrize(
    ("flags", "setting", "value"),
    [
        ("--max-num-seq 7", "max_num_seqs", 7),
        ("--config {file}", "max_num_seqs", 9),
        ("--config {file} --max-num-seqs 7", "max_num_seqs", 7),
        ("--config {file}", "enable_prefix_caching", False),
        (
            "--speculative-config.method ngram --speculative-config.num_speculative_tokens 4 "
            "--speculative-config.prompt_lookup_min 2 --speculative-config.prompt_lookup_max=4",
            "speculative_config",
            {"method": "ngram", "num_speculative_tokens": 4},
        ),
        ("--max-num-seqs x --bogus", "max_num_seqs", 256),
        ("--config {file} --max-num 7", "max_num_seqs", 256),
    ],
)
def test_search_starts_from_the_settings_that_the_server_reads(
    tmp_path: Path, flags: str, setting: str, value: object
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 9\nenable-prefix-caching: false\nenforce-eager: true\n")
    command = f"vllm serve m --port {{port}} {flags.replace('{file}', str(file))} {{flags}}"
    recipe = server_recipe(RestartableServer(url="http://h:{port}", restart_cmd=command), tmp_path)
    assert recipe.settings_in_command[setting] == value
    is_read = "--config" in flags and "--max-num 7" not in flags
    assert recipe.facts["server_eager"] == is_read
