"""Masks applied as bits are what the library's bytes say, whatever rows, widths and schedules."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from ridgeline.engine.engine import Engine
from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.engine.structured_output import guidance
from ridgeline.engine.structured_output.guidance import GuidanceMasks
from ridgeline.engine.structured_output.token_bits import (
    allow_only,
    forbid,
    forbid_widened,
    is_allowed,
    new_words,
)
from ridgeline.errors import BadInput
from ridgeline.records import OutputGrammar, Sampling

Masking = Callable[[torch.Tensor, Sequence[int], torch.Tensor], None]
MASKINGS: list[Masking] = [forbid, forbid_widened]
"""That of the CPU, and that of other devices."""
WIDTHS = (1, 7, 31, 32, 33, 63, 64, 65, 1000, 4096, 50_257)


def random_words(rng: random.Random, num_rows: int, width: int) -> torch.Tensor:
    """Rows that allow everything, nothing, few, most or half of the tokens."""
    words_RW = new_words(num_rows, width)
    for words_W in words_RW:
        share = rng.choice((0.0, 0.002, 0.5, 0.97, 1.0))
        allow_only(words_W, [token for token in range(width) if rng.random() < share])
    return words_RW


@pytest.mark.parametrize("width", WIDTHS)
def test_forbidden_tokens_are_minus_infinity_and_the_rest_keeps_its_bits(width: int) -> None:
    rng = random.Random(width)
    words_RW = random_words(rng, 4, width)
    logits_SV = torch.randn(6, width, generator=torch.Generator().manual_seed(width))
    logits_SV.flatten()[:: max(1, width // 3)] = torch.nan
    logits_SV[:, -1] = -0.0
    rows = [5, 0, 3, 2]
    expected_SV = logits_SV.clone()
    for row, words_W in zip(rows, words_RW, strict=True):
        for token in range(width):
            if not is_allowed(words_W, token):
                expected_SV[row, token] = -torch.inf
    native_SV, widened_SV = logits_SV.clone(), logits_SV.clone()
    forbid(native_SV, rows, words_RW)
    forbid_widened(widened_SV, rows, words_RW)
    for found_SV in (native_SV, widened_SV):
        assert torch.equal(found_SV.view(torch.int32), expected_SV.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_layouts_are_masked_alike(dtype: torch.dtype) -> None:
    words_RW = random_words(random.Random(1), 3, 100)
    logits_SV = torch.randn(3, 100)
    expected_SV = logits_SV.clone()
    forbid(expected_SV, [0, 1, 2], words_RW)
    other_SV = logits_SV.to(dtype)
    forbid(other_SV, [0, 1, 2], words_RW)
    assert torch.equal(other_SV, torch.where(expected_SV.isinf(), -torch.inf, logits_SV.to(dtype)))
    wide_SV = torch.zeros(3, 101)
    wide_SV[:, :100] = logits_SV
    forbid(wide_SV[:, :100], [0, 1, 2], words_RW)
    assert torch.equal(wide_SV[:, :100], expected_SV) and not wide_SV[:, 100].any()
    turned_VS = logits_SV.t().contiguous()
    forbid(turned_VS.t(), [0, 1, 2], words_RW)
    assert torch.equal(turned_VS.t(), expected_SV)


@pytest.mark.parametrize("num_rows", [1, 3, 64, 65, 70])
@pytest.mark.parametrize("apply", MASKINGS)
def test_words_of_later_rows_may_be_missing(apply: Masking, num_rows: int) -> None:
    """Rows that wait or have failed leave words at the end that nothing was written to."""
    words_RW = random_words(random.Random(2), 70, 100)
    logits_SV = torch.randn(70, 100)
    expected_SV, found_SV = logits_SV.clone(), logits_SV.clone()
    rows = random.Random(num_rows).sample(range(70), num_rows)
    for row, words_W in zip(rows, words_RW, strict=False):
        forbid(expected_SV[row : row + 1], [0], words_W[None])
    apply(found_SV, rows, words_RW)
    assert torch.equal(found_SV, expected_SV)


def test_bits_beyond_the_words_are_refused() -> None:
    with pytest.raises(ValueError, match="each token needs a bit"):
        forbid(torch.zeros(1, 65), [0], new_words(1, 64))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", max_num_seqs=8, kv_cache_memory_bytes=32 << 20) as engine:
        yield engine


def random_grammar(rng: random.Random) -> OutputGrammar:
    """A regular expression, a choice or a schema."""
    letters = "".join(rng.sample("abcdefgxyz019 ._", rng.randint(1, 9)))
    kind = rng.randrange(4)
    if kind == 0:
        low = rng.randint(0, 3)
        return OutputGrammar("regex", f"([{letters[:-1]}b]{{{low},{low + 4}}},?)+")
    if kind == 1:
        return OutputGrammar("choice", f'["{letters}", "yes", "yes {letters}"]')
    if kind == 2:
        return OutputGrammar("regex", r"(.|\n)*" if rng.random() < 0.5 else "[^a]{1,40}")
    names = ", ".join(f'"{name}": {{"type": "string"}}' for name in set(letters) - set(" ._"))
    return OutputGrammar("json", f'{{"type": "object", "properties": {{{names}}}}}')


def expected_row(masks: GuidanceMasks, point: SamplePoint, logits_V: torch.Tensor) -> torch.Tensor:
    """By a fresh matcher and the library's bytes, one for each token."""
    assert point.sampling.structured is not None
    matcher = masks._compiled[point.sampling.structured].matcher.deep_copy()
    output = [token for token in point.history[point.num_prompt :] if token not in masks._eos]
    assert not output or matcher.consume_tokens(output)
    bias = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
    if len(output) < len(point.history) - point.num_prompt:
        bias = torch.zeros_like(bias)
        bias[masks._eos] = 1
    return logits_V.masked_fill(bias[: len(logits_V)] == 0, -torch.inf)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("apply", MASKINGS)
def test_random_grammars_and_schedules_are_masked_as_one_by_one(
    engine: Engine, apply: Masking, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come, wait, are forgotten and go; none waits for ever."""
    monkeypatch.setattr(guidance, "forbid", apply)
    rng, masks = random.Random(seed), engine._masks
    assert isinstance(masks, GuidanceMasks)
    width = engine.resolved.spec.vocab_size
    grammars = [random_grammar(rng) for _ in range(5)]
    for grammar in grammars:
        masks.prepare(grammar)
    outputs = {row: (rng.choice(grammars), list[int]()) for row in range(12)}
    waited = dict.fromkeys(outputs, 0)
    for step in range(24):
        monkeypatch.setattr(guidance, "STEP_S", rng.choice((0.0, 0.0, 10.0)))
        monkeypatch.setattr(guidance, "CHEAP_S", rng.choice((0.0, 60.0)))
        rows = rng.sample(sorted(outputs), 8)
        points = [
            SamplePoint(Sampling(structured=grammar), row, len(output), 1, (9, *output), ())
            for row in rows
            for grammar, output in (outputs[row],)
        ]
        can_wait = [rng.random() < 0.8 for _ in rows]
        logits_SV = torch.randn(8, width, generator=torch.Generator().manual_seed(step))
        masked_SV = logits_SV.clone()
        unmasked = masks.apply_in_time(masked_SV, points, can_wait)
        assert not unmasked.failed and all(can_wait[i] for i in unmasked.late)
        for i, (row, point) in enumerate(zip(rows, points, strict=True)):
            waited[row] = waited[row] + 1 if i in unmasked.late else 0
            if i in unmasked.late:
                assert torch.equal(masked_SV[i], logits_SV[i])
                continue
            assert torch.equal(masked_SV[i], expected_row(masks, point, logits_SV[i]))
            token = int(masked_SV[i].argmax())
            if point.history[-1] in masks._eos or len(point.history) > 12:
                outputs[row] = rng.choice(grammars), []
            else:
                outputs[row][1].append(token)
        if rng.random() < 0.2:
            masks._states.clear()
    assert max(waited.values()) < 12


@pytest.mark.parametrize("apply", MASKINGS)
@pytest.mark.parametrize("left", ["late", "failed", "later in the step"])
def test_row_that_looks_like_a_draft_of_the_row_before_is_masked_or_waits(
    engine: Engine, apply: Masking, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests with one seed, prompt and grammar, the second a token ahead, where the mask of
    the first is not there."""
    monkeypatch.setattr(guidance, "forbid", apply)
    monkeypatch.setattr(guidance, "new_words", lambda *sizes: new_words(*sizes).zero_())
    monkeypatch.setattr(guidance, "CHEAP_S", 0.0)
    masks = engine._masks
    assert isinstance(masks, GuidanceMasks)
    masks._late = frozenset()
    masks._states.clear()
    date, other = OutputGrammar("regex", r"(19|20)\d\d-\d\d"), OutputGrammar("choice", '["yes"]')
    for grammar in (date, other):
        masks.prepare(grammar)
    (digit,) = engine.tokenizer.encode("1", add_special_tokens=False)
    behind = SamplePoint(Sampling(structured=date), 3, 0, 1, (9,), ())
    ahead = SamplePoint(Sampling(structured=date), 3, 1, 1, (9, digit), ())
    unrelated = SamplePoint(Sampling(structured=other), 8, 0, 1, (9,), ())
    points, can_wait = [behind, ahead], [True, True]
    if left == "late":
        monkeypatch.setattr(guidance, "STEP_S", 0.0)
        points, can_wait = [unrelated, *points], [True] * 3
    elif left == "failed":
        real = GuidanceMasks._write_mask

        def failing(self: GuidanceMasks, words_W: torch.Tensor, key: Any, *given: Any) -> None:
            if given[0] is behind:
                raise BadInput("too many items")
            real(self, words_W, key, *given)

        monkeypatch.setattr(GuidanceMasks, "_write_mask", failing)
    else:
        can_wait = [True, False]
    logits_SV = torch.randn(len(points), engine.resolved.spec.vocab_size)
    masked_SV = logits_SV.clone()
    unmasked = masks.apply_in_time(masked_SV, points, can_wait)
    place = len(points) - 1
    if left == "late":
        assert unmasked.late == {1, 2}
    else:
        assert place not in unmasked.late and list(unmasked.failed) == [0] * (left == "failed")
        assert torch.equal(masked_SV[place], expected_row(masks, ahead, logits_SV[place]))
