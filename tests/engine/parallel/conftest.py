"""Tiny checkpoints, made once for all tests of parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conformance.tiny_models import make_model
from tests.engine.parallel.emulated import Checkpoint


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The folder of a tiny model of a family."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_model(name, made[name])
        return made[name]

    return get


@pytest.fixture(autouse=True)
def one_thread_each() -> Iterator[None]:
    """One thread for the reference and rank 0, as for the other ranks: sums have the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
