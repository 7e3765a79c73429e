"""Weights made during a climb: made once, found again, refused where the time is too short."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.cli.lab import Tokenised
from ridgeline.cli.making import maker
from ridgeline.engine.text import load_tokenizer
from ridgeline.errors import BadInput, CannotRun
from ridgeline.measure.workload import parse_workload
from ridgeline.optimize.subject import Make
from ridgeline.settings import Settings
from ridgeline.spec.load import load_spec

INT4 = Settings(model="demo", quantization="int4", max_num_seqs=4)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    tokenizer = load_tokenizer("demo")
    return maker(Tokenised(parse_workload("chat-and-code"), tokenizer), tokenizer, tmp_path)


def test_it_is_made_once_and_opens_as_a_model(make: Make, tmp_path: Path) -> None:
    found = make(INT4, "rtn", 60.0)
    assert found.quantization is None and found.max_num_seqs == 4
    assert load_spec(found.model).layers[0].mlp.gate.format.kind == "int4"
    written = (Path(found.model) / "config.json").stat().st_mtime_ns
    assert make(INT4, "rtn", 0.0) == found
    assert (Path(found.model) / "config.json").stat().st_mtime_ns == written


def test_what_takes_too_long_is_refused_and_leaves_no_half_model(
    make: Make, tmp_path: Path
) -> None:
    with pytest.raises(CannotRun, match="making the weights takes about"):
        make(INT4, "hqq", -1.0)
    assert not list(tmp_path.glob("demo-int4-hqq-*/config.json"))


def test_formats_that_nobody_makes_are_refused(make: Make) -> None:
    with pytest.raises(BadInput, match="no weights can be made"):
        make(Settings(model="demo"), "gptq", 60.0)
