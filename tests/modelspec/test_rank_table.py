"""What each rank of a layout holds."""

from __future__ import annotations

import pytest

import ridgeline
from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost.kv_cache import kv_bytes_per_token
from ridgeline.modelspec.cost.ranks import rank_table


def test_ranks_add_up_to_the_cache_of_the_model() -> None:
    spec = load_spec("dummy:llama-3.1-8b")
    table = rank_table(spec, "tp=2 pp=2 cp=2")
    assert [rank.rank for rank in table.ranks] == list(range(8))
    assert {(rank.layers, rank.kv_heads) for rank in table.ranks} == {(16, 4)}
    assert sum(rank.kv_bytes_per_token for rank in table.ranks) == kv_bytes_per_token(spec)


def test_more_ranks_than_key_heads_hold_the_same_cache() -> None:
    one, many = (rank_table(load_spec("demo"), f"tp={size}").ranks for size in (1, 4))
    assert len(one) == 1
    assert sum(rank.kv_bytes_per_token for rank in many) >= one[0].kv_bytes_per_token


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "sp=2", "tp=999", "tp=64 pp=64"])
def test_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        rank_table(load_spec("demo"), text)


def test_layout_that_does_not_suit_the_model_is_refused() -> None:
    with pytest.raises(CannotRun, match="no experts"):
        ridgeline.inspect("demo", layout="ep=2")
