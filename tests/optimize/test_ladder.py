"""The ladder as data: settings of a row, its preconditions, and rejected rows."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from ridgeline.config.settings import Settings, Speculative, settings_from
from ridgeline.errors import BadInput
from ridgeline.optimize.ladder import (
    Rung,
    candidates_of,
    load_default_ladder,
    parse_ladder,
    unmet_need,
)
from ridgeline.workflows.optimize.optimize import ladder_of
from tests.house.code import ROOT
from tests.optimize.simulated_servers import NAIVE

HEAD = "[weights]\nrisk = 0.1\ncomplexity = 0.05\n"
ROW = """
[[rung]]
id = "x"
title = "X"
technique = "t"
honesty = "exact"
term = "bytes"
risk = 1
complexity = 2
why = "because"
hurts_when = "never"
"""


def rung(more: str) -> Rung:
    return parse_ladder(HEAD + ROW + more).rungs[0]


def naive() -> Settings:
    return settings_from(dict(NAIVE))


def test_the_shipped_ladder_starts_from_the_naive_deployment() -> None:
    facts = {"shared_prompt_share": 0.5, **{name: getattr(naive(), name) for name in NAIVE}}
    possible = {
        r.id
        for r in load_default_ladder().rungs
        if unmet_need(r, {**facts, "quantization": None}) is None
    }
    assert {"static-batching", "dynamic-batching", "continuous-batching", "int8"} <= possible
    assert "batch-limit" not in possible
    assert "chunked-prefill" not in possible


def test_activations_of_16_bits_can_be_given_up_again() -> None:
    rungs = {row.id: row for row in load_default_ladder().rungs}
    facts = {"quantization": "int8", "activations": "int16", "device": "cpu"}
    assert unmet_need(rungs["int8-weights"], facts) and unmet_need(rungs["int8"], facts)
    assert unmet_need(rungs["int8-activations"], facts) is None
    [back] = candidates_of(rungs["int8-activations"], naive(), facts)
    assert back.changes == {"activations": "int8"}
    assert unmet_need(rungs["int8-activations"], {**facts, "activations": "int8"})


def test_a_value_a_multiple_and_back_to_the_default() -> None:
    row = rung(
        "changes = { batching = 'continuous', max_model_len = { unset = true } }\n"
        "variants = [{ max_num_seqs = { times = 2, max = 24 } },"
        " { max_num_seqs = { times = 0.5 } }]\n"
    )
    incumbent = Settings(batching="static", max_model_len=512)
    found = list(candidates_of(row, incumbent, {"max_num_seqs": 16, "batching": "static"}))
    assert [c.settings.max_num_seqs for c in found] == [24, 8]
    assert all(c.settings.batching == "continuous" for c in found)
    assert all(c.settings.max_model_len is None for c in found)
    assert found[0].label == "X (max_num_seqs=24)"


def test_a_variant_that_changes_nothing_is_no_candidate() -> None:
    row = rung("changes = { batching = 'continuous' }\n")
    assert not list(candidates_of(row, Settings(batching="continuous"), {"batching": "continuous"}))


def test_an_unmet_need_is_explained_and_an_unknown_one_forbids_nothing() -> None:
    row = rung("needs = ['max_num_seqs > 1', 'tokens_per_moon > 3']\n")
    assert unmet_need(row, {"max_num_seqs": 1}) == "needs max_num_seqs > 1 (found 1)"
    assert unmet_need(row, {"max_num_seqs": 2}) is None


def test_risk_and_complexity_require_a_larger_gain() -> None:
    ladder = parse_ladder(HEAD + ROW)
    assert ladder.weights.discount(ladder.rungs[0]) == pytest.approx(1.2)


@pytest.mark.parametrize(
    "more",
    [
        "colour = 'red'\n",
        "changes = { max_num_sequences = 3 }\n",
        "variants = [{ speed = 11 }]\n",
    ],
)
def test_a_key_or_setting_that_does_not_exist_is_named(more: str) -> None:
    with pytest.raises(BadInput, match=r"colour|max_num_sequences|speed"):
        rung(more)


def test_the_row_in_the_documentation_is_a_ladder(tmp_path: Path) -> None:
    """As it stands there, in a file given with --ladder."""
    page = (ROOT / "docs" / "guides" / "optimize-engine.md").read_text(encoding="utf-8")
    block = re.search(r"^\[\[rung\]\]\n(?:.+\n)+?(?=```)", page, re.MULTILINE)
    assert block is not None
    file = tmp_path / "mine.toml"
    file.write_text(block[0])
    found = ladder_of(file)
    assert [r.id for r in found.rungs] == ["small-blocks"]
    assert found.weights == load_default_ladder().weights
    options = list(candidates_of(found.rungs[0], naive(), {"block_size": 16}))
    assert [option.settings.block_size for option in options] == [8]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no rungs"),
        (HEAD, "no rungs"),
        (ROW.replace("[[rung]]", "[[rungs]]"), "rungs"),
        (ROW.replace("[[rung]]", "[rung]"), r"\[\[rung\]\]"),
        ("rung = 3\n", r"\[\[rung\]\]"),
        ("[weights]\nrisk = 'much'\ncomplexity = 0\n" + ROW, "weights"),
        ("[weights]\nrisk = 0.1\n" + ROW, "complexity"),
        (ROW + "needs = ['block_size']\n", "block_size"),
        (ROW + "needs = 'block_size != 8'\n", "needs|array"),
        (ROW + "changes = { block_size = 0 }\n", "block-size"),
        (ROW + "variants = [{ batching = 'magic' }]\n", "magic"),
    ],
)
def test_empty_or_impossible_ladder_is_rejected(text: str, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        parse_ladder(text)


def test_two_rows_with_one_id_are_refused() -> None:
    with pytest.raises(BadInput, match="same id"):
        parse_ladder(HEAD + ROW + ROW)


def test_every_variant_of_the_shipped_ladder_makes_valid_settings() -> None:
    resolved = {"max_num_seqs": 16, "max_num_batched_tokens": 256}
    for row in load_default_ladder().rungs:
        start = naive()
        if row.id in ("draft-length", "no-speculation"):  # of a speculation that is on
            drafts = Speculative(method="ngram", num_speculative_tokens=4)
            start = msgspec.structs.replace(start, speculative_config=drafts)
        candidates = list(candidates_of(row, start, resolved))
        assert candidates, row.id
        made = [variant["make"] for variant in row.variants if "make" in variant]
        assert [candidate.make for candidate in candidates if candidate.make] == made, row.id
