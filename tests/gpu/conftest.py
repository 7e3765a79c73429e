"""Tests that need a CUDA device; skipped elsewhere. `benchmarks/gpu/run.sh` runs them on a card."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "/tests/gpu/" in str(item.path)]
    for item in here:
        item.add_marker(pytest.mark.cuda)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device is available"))
