"""The examples in the docstrings of the public API run, and print nothing but what they show."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

import ridgeline

HOMES = sorted({home for home in ridgeline._HOMES.values() if home.startswith("ridgeline.api.")})


@pytest.mark.slow
@pytest.mark.parametrize("home", HOMES)
def test_examples_of_the_docstrings_hold(home: str) -> None:
    outcome = doctest.testmod(import_module(home), optionflags=doctest.ELLIPSIS)
    assert outcome.attempted and not outcome.failed
