"""The bill of materials."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from scripts.sbom import bill_of_materials, installed_closure


def test_bill_of_materials_lists_dependencies_of_dependencies() -> None:
    packages = installed_closure("fastapi")
    document = bill_of_materials(packages, "fastapi")
    by_name = {component["name"]: component for component in document["components"]}
    assert {"starlette", "pydantic", "pydantic-core", "typing-extensions"} <= set(by_name)
    starlette = by_name["starlette"]
    assert starlette["purl"] == f"pkg:pypi/starlette@{packages['starlette'].version}"
    assert starlette["licenses"] == [{"license": {"name": "BSD-3-Clause"}}]
    assert "fastapi" not in by_name and document["metadata"]["component"]["name"] == "fastapi"


def test_what_is_not_installed_has_no_bill() -> None:
    with pytest.raises(PackageNotFoundError):
        installed_closure("a-package-that-is-not-installed")
