"""YAML text reads back as the value it was made of."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.operate.yaml_text import to_yaml

TEXT = st.text(st.characters(categories=("L", "N", "P", "Zs")), max_size=12)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(st.characters(categories=("L", "N", "P", "Zs")), max_size=12)
)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name not in ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_value_survives(value: Any) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize("value", [{}, [], {"a": {}}, [[]], [[1, [2]], {"b": [{"c": 1, "d": 2}]}]])
def test_nested_and_empty_values_survive(value: Any) -> None:
    assert yaml.safe_load(to_yaml(value)) == value
