"""A flag that would change nothing is refused, never dropped in silence."""

from __future__ import annotations

import pytest

from ridgeline.cli.main import main
from ridgeline.cli.validate.unused_options import IDLE_BESIDE, NEEDS
from tests.cli.whole import NEEDED, SHAPE, options, refused

VALUES = {"workload": "chat", "weight_dtype": "int8", "kv_dtype": "int8", "input": "points.jsonl",
          "draft_model": "llama-3.2-1b", "hit_rate": "0", "acceptance": "0.5"}  # fmt: skip


def flagged(name: str) -> list[str]:
    return ["--" + name.replace("_", "-"), VALUES.get(name, "2")]


def test_the_tables_speak_of_options() -> None:
    known = {(command, name) for command, name, _ in options()}
    for table in (NEEDS, IDLE_BESIDE):
        for command, rows in table.items():
            named = {*rows, *(each for others in rows.values() for each in others)}
            assert {(command, name) for name in named if name != "sweep"} <= known | {
                ("diagnose", "find_goodput")
            }


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("command", "name"), [(command, name) for command, rows in NEEDS.items() for name in rows]
)
def test_a_flag_alone_that_needs_another(
    capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    flag, value = flagged(name)
    asked = [command, *NEEDED.get(command, []), flag, value]
    refused(capsys, asked, f"{flag} has no effect without")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("command", "name"), [(command, name) for command, rows in IDLE_BESIDE.items() for name in rows]
)
def test_a_flag_beside_what_stands_in_its_place(
    capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    flag, value = flagged(name)
    for other in IDLE_BESIDE[command][name]:
        asked = [command, *NEEDED.get(command, []), flag, value, *flagged(other)]
        refused(capsys, asked, f"{flag} has no effect beside --")


@pytest.mark.parametrize(
    "more",
    [
        ["--repair-s", "60", "--mtbf-s", "3600"],
        ["--startup-s", "60", "--target-in-flight", "4", "--autoscale", "2"],
        ["--repair-s", "60", "--sweep", "mtbf-s=3600", "--num-workers", "1"],
        ["--acceptance", "0.7", "--num-speculative-tokens", "3"],
    ],
)
def test_with_the_other_it_is_taken(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    assert main(["simulate", *SHAPE, "--num-prompts", "20", *more]) == 0, capsys.readouterr().err


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("args", "flag"),
    [
        (["quantize", "demo", "-o", "made", "--calibration-tokens", "64"], "--calibration-tokens"),
        (["quantize", "demo", "-o", "made", "--calibration-windows", "4"], "--calibration-windows"),
        (["quantize", "demo", "-o", "made", "--bits", "16", "--steps", "9"], "--steps"),
        (["train-drafter", "demo", "-o", "made", "--kind", "eagle", "--heads", "4"], "--heads"),
        (["serve", "demo", "--batch-window", "22:00-06:00", "--port", "0"], "--batch-window"),
        (["serve", "demo", "--batch-store", "b", "--batch-window", "late", "--port", "0"], "late"),
        (["serve", "demo", "--batch-store", "no/b", "--port", "0"], "--batch-store"),
    ],
)
def test_what_the_commands_refuse_themselves_begins_nothing(
    capsys: pytest.CaptureFixture[str], args: list[str], flag: str
) -> None:
    refused(capsys, args, flag)
