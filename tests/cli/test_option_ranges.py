"""A number out of range is refused, whatever its source, before any work begins."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest

from ridgeline.config.load import BenchOptions
from ridgeline.config.option import Option, options_of
from ridgeline.config.settings import Settings
from ridgeline.config.units import Range
from ridgeline.errors import BadInput
from tests.cli.command_line import NEEDED, NO_SERVER, SHAPE, options, refused

ENGINE = options_of(Settings)


def numbers() -> Iterator[tuple[str, Option]]:
    """Every numeric option of the command line; the engine's once, with `serve`."""
    for command, option in options():
        is_number = option.type in (int, float) and not option.choices
        shared = ENGINE.get(option.name) == option and command != "serve"
        if is_number and not shared:
            yield command, option


def bad_texts(option: Option) -> Iterator[str]:
    """Texts beyond both ends of the range, and texts that are not numbers."""
    assert option.range is not None
    yield from ("-1", "nan")
    if option.type is int:
        yield "9" * 30
    elif option.range.maximum < inf:
        yield from ("inf", "1e300")


def test_every_number_has_a_unit_with_a_range() -> None:
    for command, option in numbers():
        assert option.about.unit is not None, f"{command} {option.flag}"
        assert option.range is not None and option.range != Range(-inf, inf), option.flag


def test_every_default_is_in_range() -> None:
    for _, option in numbers():
        option.check(option.default, option.flag)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("command", sorted({command for command, _ in numbers()}))
def test_numbers_out_of_range_are_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for owner, option in numbers():
        if owner == command:
            for text in bad_texts(option):
                args = [command, *NEEDED.get(command, []), option.flag, text]
                refused(capsys, args, option.flag)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("args", "flag"),
    [
        (["mock-server", "--port", "99999"], "--port"),
        (["serve", "demo", "--port", "65536"], "--port"),
        (["serve", "demo", "--num-threads", "1025"], "--num-threads"),
        (["train-drafter", "demo", "-o", "made", "--learning-rate", "0"], "--learning-rate"),
        (["bench", "--burstiness", "0"], "--burstiness"),
        (["cost", *SHAPE, "--pue", "0.5"], "--pue"),
        (["cost", *SHAPE, "--watts", "nan"], "--watts"),
        (["simulate", *SHAPE, "--num-seeds", "0"], "--num-seeds"),
        (["optimize", "demo", "--price-per-hour", "0"], "--price-per-hour"),
        (["explain", "demo", "--request-rate", "inf"], "--request-rate"),
        (["chat", *NO_SERVER, "--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_values_just_out_of_range_are_refused(
    capsys: pytest.CaptureFixture[str], args: list[str], flag: str
) -> None:
    refused(capsys, args, flag)


def test_a_range_contains_its_ends_unless_exclusive() -> None:
    assert Range(0, 1).contains(0) and Range(0, 1).contains(1)
    assert not Range(0, 1).contains(float("nan"))
    assert not Range(0, 1, exclusive=True).contains(0)
    assert str(Range(0, 5, exclusive=True)) == "> 0, <= 5"


def test_api_calls_have_the_same_ranges() -> None:
    for section, values in ((Settings, {"max_num_seqs": 0}), (BenchOptions, {"num_prompts": 0})):
        with pytest.raises(BadInput, match="out of range"):
            section(**values)


def test_request_rate_may_be_infinite() -> None:
    assert BenchOptions().request_rate == inf


def test_bounds_keep_their_decimals() -> None:
    assert Range(0, 0.5).bound_of(0.6) == "<= 0.5"
    assert Range(1, 4_000_000).bound_of(5e6) == "<= 4,000,000"
