"""The wheel and the sdist hold every tracked file: code, templates, tables, assets."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest
from scikit_build_core.build import build_sdist, build_wheel

from tests.house.code import ROOT, name_of, tracked


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where a build backend runs


def package_files() -> set[str]:
    return {name for path in tracked() if (name := name_of(path)).startswith("ridgeline/")}


@pytest.mark.slow
def test_wheel_has_the_package_data(tmp_path: Path) -> None:
    wheel = build_wheel(str(tmp_path), {"wheel.cmake": "false"})  # the same files, nothing compiled
    names = zipfile.ZipFile(tmp_path / wheel).namelist()
    packed = {name for name in names if name.startswith("ridgeline/")}
    compiled = {name for name in packed if name.endswith(".so")}
    assert packed - compiled == package_files()
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_sdist_has_all_that_a_build_needs(tmp_path: Path) -> None:
    sdist = build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    native = {name for path in tracked() if (name := name_of(path)).startswith("native/")}
    needed = package_files() | native | {"pyproject.toml", "README.md", "LICENSE"}
    assert needed <= packed, needed - packed
