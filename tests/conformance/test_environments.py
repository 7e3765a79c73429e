"""Environments of peers: one that is named must hold the version that would be installed."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from peers import environments

pytestmark = pytest.mark.slow


@pytest.fixture
def here() -> Path:
    """This very environment, as if it were a peer's."""
    return Path(sys.prefix)


def pinned(monkeypatch: pytest.MonkeyPatch, package: str, version: str) -> None:
    monkeypatch.setitem(environments.HELD, "transformers", (package, version))


def test_a_named_environment_with_the_pinned_version_is_used_as_it_is(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pinned(monkeypatch, "pytest", importlib.metadata.version("pytest"))
    found = environments.ensure(tmp_path / "home", ["transformers"], {"transformers": here})
    assert found == {"transformers": here / "bin/python"}
    assert not (tmp_path / "home").exists(), "nothing is made"


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [("pytest", "0.0.1", "not 0.0.1"), ("no-such-package", "1.0", "holds no no-such-package")],
)
def test_another_version_or_none_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str, said: str
) -> None:
    pinned(monkeypatch, package, version)
    with pytest.raises(environments.NotThisEnvironmentError, match=said):
        environments.existing("transformers", here)


def test_every_environment_that_can_be_named_can_be_made() -> None:
    assert set(environments.HELD) < set(environments.MAKERS)
