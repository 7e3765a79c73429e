"""Tests of the Triton kernels: in the interpreter, or with RIDGELINE_TEST_DEVICE=cuda compiled."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def interpreter() -> None:
    """The repaired interpreter, unless the tests run on a GPU."""
    from tests.engine.kernels.triton.interpreter import DEVICE, repair_interpreter

    if DEVICE.type == "cpu":
        assert os.environ.get("TRITON_INTERPRET") == "1", "tests/conftest.py sets it"
        repair_interpreter()
