"""Tiny checkpoints, made once for all tests of parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

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
