"""The fast check of token ids agrees with a loop over them."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from ridgeline.engine.validate import check_tokens
from ridgeline.errors import BadInput

VOCAB = 100


def first_bad(tokens: Collection[Any]) -> int | None:
    good = (type(token) is int and 0 <= token < VOCAB for token in tokens)
    return next((place for place, is_good in enumerate(good) if not is_good), None)


def test_first_bad_id_is_named_and_good_ones_pass() -> None:
    rng = random.Random(1)
    odd = [-1, VOCAB, True, False, 1.0, "1", None, 10**30, np.int64(3)]
    for _ in range(2000):
        some: list[Any] = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))]
        for _ in range(rng.randint(0, 2)):
            some.insert(rng.randint(0, len(some)), rng.choice(odd))
        place = first_bad(some)
        for tokens in (some, tuple(some), dict.fromkeys(some)):
            if first_bad(tokens) is None:
                check_tokens(tokens, VOCAB)
                continue
            with pytest.raises(BadInput) as error:
                check_tokens(tokens, VOCAB)
            assert (
                place is None or isinstance(tokens, dict) or f"at index {place}" in str(error.value)
            )


def test_arrays_are_not_token_ids() -> None:
    with pytest.raises(BadInput):
        check_tokens(np.array([1, 2]), VOCAB)  # type: ignore[arg-type]
