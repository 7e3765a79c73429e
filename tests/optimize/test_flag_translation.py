"""Flags of one server in the words of another: every row, every pair of servers."""

from __future__ import annotations

import itertools
import shlex

import pytest

from ridgeline.optimize.external.server_rungs import server_rungs
from ridgeline.optimize.output.flag_translation import (
    equal_flags,
    lookup_words,
    translate_flags,
)
from ridgeline.optimize.output.server_configs import STARTS
from ridgeline.optimize.server_settings import FLAGS, REMOVE
from ridgeline.twin.servers.command_line import read_command
from tests.optimize.test_pinned_flags import PINNED

PAIRS = list(itertools.permutations(STARTS, 2))
VALUES = {"{number}": "32", "{num}": "3", "{rows}": "4", "{model}": "org/head", "{tp}": "4"}


def known_flags(server: str) -> set[str]:
    return set(PINNED[server].takes)


def filled(template: str) -> str:
    for name, value in VALUES.items():
        template = template.replace(name, value)
    return template


@pytest.mark.parametrize("row", equal_flags(), ids=lambda row: shlex.join(row))
def test_rows_name_flags_of_their_servers_and_agree_both_ways(
    row: dict[str, dict[str, str]],
) -> None:
    for server, templates in row.items():
        assert set(templates) <= known_flags(server), server
    for own, other in itertools.permutations(row, 2):
        if not row[own]:
            continue
        flags = [(flag, filled(value)) for flag, value in row[own].items()]
        expected = [filled(word) for pair in row[other].items() for word in pair if word]
        assert translate_flags(flags, own, other, 4) == (expected, []), (own, other)


@pytest.mark.parametrize(("own", "other"), PAIRS)
def test_every_rung_is_translated_or_named(own: str, other: str) -> None:
    for rung in server_rungs(own):
        for changes in rung.variants:
            flags = [pair for pair in changes.get(FLAGS, {}).items() if "{" not in pair[0]]
            kept = [(flag, value) for flag, value in flags if not flag.startswith(REMOVE)]
            words, left = translate_flags(flags, own, other, None)
            assert {word for word in words if word.startswith("--")} <= known_flags(other)
            assert set(left) <= set(kept)
            if not words and kept:
                assert left or any(own in row and row.get(other) == {} for row in equal_flags())
            model = [word.replace("{model}", "org/m") for word in STARTS[other]]
            read_command(shlex.join([*model, *words]))  # raises if its twin refuses them


def test_formats_are_spelt_as_the_other_server_spells_them() -> None:
    flags = [("--kv-cache-dtype", "fp8"), ("--gpu-memory-utilization", "0.95")]
    words, left = translate_flags(flags, "vllm", "tgi", None)
    assert words == ["--kv-cache-dtype", "fp8_e4m3fn"]
    assert left == [("--gpu-memory-utilization", "0.95")]


def test_a_head_keeps_its_checkpoint_and_its_drafts() -> None:
    spaced = '{"method": "eagle3", "model": "org/head", "num_speculative_tokens": 5}'
    words, left = translate_flags([("--speculative-config", spaced)], "vllm", "sglang", None)
    assert not left
    assert words[words.index("--speculative-draft-model-path") + 1] == "org/head"
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "6"


def test_expert_parallelism_needs_the_size_of_tensor_parallelism() -> None:
    flags = [("--enable-expert-parallel", "")]
    assert translate_flags(flags, "vllm", "sglang", 8)[0] == ["--ep-size", "8"]
    assert translate_flags(flags, "vllm", "sglang", None) == ([], flags)


def test_ngram_speculation_of_a_server_without_it() -> None:
    assert lookup_words("trtllm", 4) is None
    assert lookup_words("tgi", 4) == ["--speculate", "4"]
