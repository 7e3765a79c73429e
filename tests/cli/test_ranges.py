"""No number that cannot be is taken on the command line, and none begins any work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ridgeline.cli.params.engine import HELP
from ridgeline.cli.validate.ranges import RANGES, Range, range_of
from tests.cli.whole import NEEDED, NOBODY, SHAPE, options, refused


def numbers() -> Iterator[tuple[str, str, type]]:
    """(command, option, int or float): every numeric option of the whole application."""
    return (each for each in options() if each[2] in (int, float))


def bad_ones() -> Iterator[tuple[str, str, str]]:
    """The engine's flags are the same options everywhere: once will do."""
    for command, name, kind in numbers():
        if name not in HELP or command == "serve" or name == "seed":
            finite = range_of(command, name).most < float("inf")
            more = ["nan", *(["inf", "1e300"] if finite else [])] if kind is float else ["9" * 30]
            yield from ((command, name, text) for text in ("-1", *more))


def test_every_number_has_a_range() -> None:
    known = {range_of(command, name) for command, name, _ in numbers()}
    assert len(known) > 5
    names = {name for command, each, _ in numbers() for name in (each, f"{command}.{each}")}
    assert set(RANGES) <= names, "a row that no option has"


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("command", sorted({command for command, _, _ in numbers()}))
def test_a_number_that_cannot_be_is_refused_before_anything_begins(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for of, name, text in bad_ones():
        if of == command:
            flag = "--" + name.replace("_", "-")
            refused(capsys, [command, *NEEDED.get(command, []), flag, text], flag)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("args", "flag"),
    [
        (["mock-server", "--port", "99999"], "--port"),
        (["serve", "demo", "--port", "65536"], "--port"),
        (["train-drafter", "demo", "-o", "made", "--rate", "0"], "--rate"),
        (["bench", "--burstiness", "0"], "--burstiness"),
        (["cost", *SHAPE, "--pue", "0.5"], "--pue"),
        (["cost", *SHAPE, "--watts", "nan"], "--watts"),
        (["simulate", *SHAPE, "--num-seeds", "0"], "--num-seeds"),
        (["optimize", "demo", "--price-per-hour", "0"], "--price-per-hour"),
        (["explain", "demo", "--request-rate", "inf"], "--request-rate"),
        (["chat", *NOBODY, "--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_so_is_what_is_just_beyond(
    capsys: pytest.CaptureFixture[str], args: list[str], flag: str
) -> None:
    refused(capsys, args, flag)


def test_ends_are_allowed_where_they_are_not_open() -> None:
    assert Range(0, 1).holds(0) and Range(0, 1).holds(1) and not Range(0, 1).holds(float("nan"))
    assert not Range(0, 1, open=True).holds(0) and str(Range(0, 5, open=True)) == "> 0, <= 5"
    assert RANGES["request_rate"].holds(float("inf"))
