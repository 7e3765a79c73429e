"""What --json prints is JSON to every reader: no Infinity, no NaN."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from ridgeline.cli.main import main
from ridgeline.report.json_line import json_line
from tests.cli.command_line import SHAPE
from tests.house.code import ROOT


def strictly(text: str) -> object:
    """As a reader that is not Python's takes it."""

    def refuse(word: str) -> object:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_non_finite_numbers_are_null() -> None:
    values = {
        "a": math.inf,
        "b": [-math.inf, math.nan],
        "c": np.float64(1.5),
        "d": np.float64("inf"),
    }
    assert strictly(json_line(values)) == {"a": None, "b": [None, None], "c": 1.5, "d": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ["plan", *SHAPE],  # at the edge of the front no first token ever comes
        ["simulate", *SHAPE, "--num-prompts", "1", "--output-len", "1"],
        ["predict", *SHAPE, "--output-len", "1"],
        ["cost", *SHAPE],
    ],
    ids=lambda args: args[0],
)
def test_planning_commands_print_strict_json(
    capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert main([*args, "--json"]) == 0
    assert strictly(capsys.readouterr().out)


def test_commands_encode_json_only_through_json_line() -> None:
    """A command that encodes by itself may write what is not JSON."""
    printed = re.compile(r"print\([^)]*json(_lib)?\.(dumps|encode)")
    found = [
        path.name
        for path in (ROOT / "ridgeline" / "cli").rglob("*.py")
        if printed.search(path.read_text(encoding="utf-8"))
    ]
    assert not found
