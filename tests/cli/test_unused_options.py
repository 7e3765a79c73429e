"""An option that would have no effect is refused, never ignored silently."""

from __future__ import annotations

import pytest

from ridgeline.cli.main import main
from ridgeline.config.commands import COMMANDS
from ridgeline.config.rules import RULES, Displaces, Fixed, Needs, Restricts
from tests.cli.command_line import NEEDED, SHAPE, refused

VALUES = {
    "workload": "chat",
    "quantization": "int8",
    "kv_cache_dtype": "int8",
    "input": "points.jsonl",
    "draft_model": "llama-3.2-1b",
    "hit_rate": "0",
    "quantization_method": "gptq",
    "draft_share": "0.5",
    "keep_ratio": "0.5",
    "new_document_share": "0.5",
    "embedding_bits": "8",
    "acceptance": "0.5",
    "endpoint": "chat",
    "layout": "vllm",
    "sweep": "1,2",
    "find_goodput": "1:2",
    "url": "http://127.0.0.1:9",
    "manifests": "made",
    "cluster": "gke",
    "server": "vllm",
    "dtype": "float32",
    "activations": "int16",
    "batching": "static",
    "thread_plan": "auto",
    "speculative_config": '{"method": "ngram"}',
    "kv_eviction_config": '{"method": "streaming", "budget": 64}',
    "lm_head_quantization": "int8",
    "batch_window": "22:00-06:00",
    "canary_shadow_share": "0.5",
    "semantic_cache_max_false_hits": "0.05",
    "canary_alpha": "0.1",
    "canary_max_disagreement": "0.1",
    "canary_stages": "0.5",
}
"""A valid value of an option that does not take the number 2."""


def typed(command: str, name: str) -> list[str]:
    """The option on the command line, with a valid value."""
    option = COMMANDS[command].options[name]
    if option.about.positional:
        return [VALUES.get(name, "demo")]
    return [option.flag] if option.type is bool else [option.flag, VALUES.get(name, "2")]


def pairs(kind: type[Needs] | type[Displaces]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [
        (command, rule.option, rule.others)
        for command, rules in RULES.items()
        for rule in rules
        if isinstance(rule, kind)
    ]


def test_rules_name_options_of_their_command() -> None:
    for command, rules in RULES.items():
        known = set(COMMANDS[command].options)
        for rule in rules:
            if isinstance(rule, Fixed):
                assert {*rule.options} <= known, rule
            elif isinstance(rule, Restricts):
                assert {rule.option, *rule.kept} <= known | {"seed"}, rule
            else:
                assert {rule.option, *rule.others} <= known, rule


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("command", "name", "others"), pairs(Needs))
def test_an_option_that_needs_another_is_refused_alone(
    capsys: pytest.CaptureFixture[str], command: str, name: str, others: tuple[str, ...]
) -> None:
    option = COMMANDS[command].options[name]
    args = [command, *needed_without(command, name), *typed(command, name)]
    refused(capsys, args, f"{option.flag} has no effect without")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("command", "name", "others"), pairs(Displaces))
def test_an_option_is_refused_with_one_that_displaces_it(
    capsys: pytest.CaptureFixture[str], command: str, name: str, others: tuple[str, ...]
) -> None:
    known = COMMANDS[command].options
    for other in others[:4]:
        given = with_what_they_need(command, [name])
        words = [word for each in (*given, other) for word in typed(command, each)]
        args = [command, *needed_without(command, name), *words]
        refused(capsys, args, f"{known[other].flag} has no effect with")


def with_what_they_need(command: str, names: list[str]) -> list[str]:
    """The options, those that they need, and what these need."""
    for rule in RULES[command]:
        if isinstance(rule, Needs) and rule.option in names and not {*rule.others} & {*names}:
            return with_what_they_need(command, [*names, rule.others[0]])
    return names


def needed_without(command: str, name: str) -> list[str]:
    """What the command needs, as far as it does not get in the way of this option."""
    alone = {("predict", "input"), ("calibrate", "url"), ("top", "json")}
    return [] if (command, name) in alone else [*NEEDED.get(command, [])]


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["diagnose", "--nsight", "x.csv", "--workload", "chat"], "--workload"),
        (["diagnose", "--run", "x", "--max-num-seqs", "4"], "--max-num-seqs"),
        (["diagnose", "--url", "http://127.0.0.1:9", "--baseline", "x"], "--baseline"),
        (["diagnose", "demo", "--profile", "--request-rate", "2"], "--request-rate"),
        (["optimize", "demo", "--api-key", "k"], "--api-key"),
    ],
)
def test_options_outside_what_a_mode_reads_are_refused(
    capsys: pytest.CaptureFixture[str], args: list[str], named: str
) -> None:
    refused(capsys, args, f"{named} has no effect")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--repair-s", "60", "--mtbf-s", "3600"],
        ["--startup-s", "60", "--target-in-flight", "4", "--autoscale", "2"],
        ["--repair-s", "60", "--sweep", "mtbf-s=3600", "--num-workers", "1"],
        ["--acceptance", "0.7", "--num-speculative-tokens", "3"],
    ],
)
def test_an_option_is_accepted_with_the_one_it_needs(
    capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert main(["simulate", *SHAPE, "--num-prompts", "20", *more]) == 0, capsys.readouterr().err


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["quantize", "demo", "-o", "m", "--bits", "8", "--calibration-tokens", "64"], "--cal"),
        (["quantize", "demo", "-o", "m", "--method", "rtn", "--calibration-windows", "4"], "--cal"),
        (["quantize", "demo", "-o", "made", "--bits", "16", "--steps", "9"], "--steps"),
        (["train-drafter", "demo", "-o", "made", "--kind", "eagle", "--heads", "4"], "--heads"),
        (["prune", "demo", "-o", "m", "--drop-layers", "1", "--method", "sparsegpt"], "--method"),
        (["prune", "demo", "-o", "m", "--sparsity", "0.5", "--no-compensate"], "--no-compensate"),
        (["prune", "demo", "-o", "m", "--sparsity", "0.5", "--format", "sparse-24"], "--format"),
        (["serve", "demo", "--batch-store", "b", "--batch-window", "late", "--port", "0"], "late"),
        (["serve", "demo", "--batch-store", "no/b", "--port", "0"], "--batch-store"),
    ],
)
def test_values_that_do_not_fit_together_are_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], args: list[str], named: str
) -> None:
    refused(capsys, args, named)


def test_unused_options_of_a_configuration_file_are_accepted(
    capsys: pytest.CaptureFixture[str], tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what was typed must have an effect: an environment variable may be set for good."""
    monkeypatch.setenv("RIDGELINE_MAX_NUM_SEQS", "4")
    refused(capsys, ["bench", "--url", "http://127.0.0.1:9", "--num-prompts", "1"], "no ")


@pytest.mark.usefixtures("no_work")
def test_needed_option_may_come_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["route", "--backend", "http://127.0.0.1:9", "--fallback-after-s", "2"]
    refused(capsys, args, "--fallback-after-s has no effect without --fallback-url")
    monkeypatch.setenv("RIDGELINE_FALLBACK_URL", "http://127.0.0.1:9")
    refused(capsys, args, "--fallback-url needs --fallback-dollars-per-hour")
