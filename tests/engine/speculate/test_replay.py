"""Replayed text: what lookups would have gained, and that it is the text's doing."""

from __future__ import annotations

import random

import pytest

from ridgeline.engine.speculate.depth_control.replay import replay
from ridgeline.engine.speculate.depth_control.step_cost import StepTimeCurve
from ridgeline.engine.speculate.drafters.ngram import NgramDrafter


def flat() -> StepTimeCurve:
    return StepTimeCurve({(b, b * d): 1.0 + 0.02 * b * d for b in (1, 4) for d in (1, 2, 5, 9, 25)})


def steep() -> StepTimeCurve:
    return StepTimeCurve({(b, b * d): float(b * d) for b in (1, 4) for d in (1, 2, 5, 9, 25)})


@pytest.mark.parametrize("batch", [1, 4])
def test_repetition_gains_where_rows_are_cheap(batch: int) -> None:
    rng = random.Random(1)
    source = [[rng.randrange(500) for _ in range(120)] for _ in range(4)]
    texts = [(piece + piece, 125) for piece in source]
    found = replay(texts, NgramDrafter(2, 4), flat(), batch, 16)
    assert found.num_tokens == 4 * 115
    assert found.gain > 2.5 and found.num_steps < 4 * 115 / batch / 2.5
    assert 0.97 < replay(texts, NgramDrafter(2, 4), steep(), batch, 16).gain < 1.1


def test_text_without_repetition_gains_nothing_and_loses_nothing() -> None:
    texts = [(list(range(i * 1000, i * 1000 + 300)), 100) for i in range(4)]
    found = replay(texts, NgramDrafter(2, 4), flat(), 2, 16)
    assert found.gain == pytest.approx(1.0) and found.num_steps == 400


def test_texts_of_any_length_are_replayed() -> None:
    texts = [([1, 2, 3], 3), ([1], 0), ([1, 1, 1, 1, 1, 1], 1), ([5, 6], 1)]
    assert replay(texts, NgramDrafter(1, 2), flat(), 3, 4).num_tokens == 1 + 5 + 1
