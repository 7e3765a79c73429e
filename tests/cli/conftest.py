"""What several tests of the command line share."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ridgeline.engine.engine import Engine


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In an empty folder, where whatever begins fails and is an internal error."""

    def begun(*args: object, **kwargs: object) -> None:
        raise AssertionError("work began")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(asyncio, "run", begun)
    monkeypatch.setattr(Engine, "from_settings", begun)
