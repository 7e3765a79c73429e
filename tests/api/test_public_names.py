"""`import ridgeline` offers its names in any order of imports, and stays light."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from typing import get_type_hints

import pytest

import ridgeline
from ridgeline.config.settings import EngineSettings, Settings

PACKAGES = sorted(ridgeline._PACKAGES)


def run(code: str) -> str:
    """Standard output of the code in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_dir_lists_the_public_names() -> None:
    assert dir(ridgeline) == sorted(ridgeline.__all__)
    assert set(ridgeline.__all__) == {"__version__", *ridgeline._HOMES}
    for name in ridgeline.__all__:
        assert getattr(ridgeline, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        ridgeline.generat  # noqa: B018


def test_every_function_is_documented_with_its_parameters() -> None:
    for name, home in ridgeline._HOMES.items():
        function = getattr(import_module(home), name)
        if not inspect.isfunction(function):
            continue
        doc = inspect.getdoc(function) or ""
        for heading in (">>> import ", "\nArgs:\n", "\nReturns:\n", "\nRaises:\n"):
            assert heading in doc, f"{name}: {heading.strip()}"
        for parameter in inspect.signature(function).parameters.values():
            assert f"\n    {parameter.name}: " in doc, f"{name}: {parameter.name}"
            assert parameter.annotation is not parameter.empty


@pytest.mark.slow
def test_star_import_offers_the_public_names() -> None:
    names = run("from ridgeline import *; print(*sorted(n for n in dir() if n[:2] != '__'))")
    assert names.split() == sorted(name for name in ridgeline.__all__ if name != "__version__")


def test_engine_keywords_are_the_settings() -> None:
    keywords, settings = get_type_hints(EngineSettings), get_type_hints(Settings)
    assert list(keywords) == [name for name in Settings.__struct_fields__ if name != "model"]
    for name, kind in keywords.items():
        if name not in ("speculative_config", "kv_eviction_config"):
            assert kind == settings[name], name


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_package_of_the_same_name_does_not_hide_the_function(name: str) -> None:
    inner = {"diagnose": "facts", "optimize": "job", "plan": "step_time", "serve": "errors"}[name]
    call = f"""
import inspect, types
assert callable(ridgeline.{name}) and isinstance(ridgeline.{name}, types.ModuleType)
assert "{name}" in ridgeline.__all__
from ridgeline.{ridgeline._HOMES[name].removeprefix("ridgeline.")} import {name} as function
assert inspect.signature(ridgeline.{name}) == inspect.signature(function)
import ridgeline.{name} as package
from ridgeline import {name} as imported
assert package is imported is ridgeline.{name}
assert ridgeline.{name}.{inner}.__name__ == "ridgeline.{name}.{inner}"
try:
    ridgeline.{name}(no_such_option=1)
except (TypeError, ridgeline.errors.BadInput) as error:
    print(type(error).__name__)
"""
    before = f"import ridgeline.errors\nimport ridgeline.{name}.{inner}\n{call}"
    after = (
        f"import ridgeline, ridgeline.errors\nfirst = ridgeline.{name}\n"
        f"import ridgeline.{name}.{inner}\nassert first is ridgeline.{name}\n{call}"
    )
    from_inside = f"from ridgeline.{name} import {inner}\nimport ridgeline.errors\n{call}"
    assert run(before) == run(after) == run(from_inside)


@pytest.mark.slow
def test_looking_at_a_function_imports_no_torch() -> None:
    light = "import sys, inspect, ridgeline\nridgeline.Sampling\n"
    light += "".join(
        f"inspect.signature(ridgeline.{name})\n" for name in PACKAGES if name != "serve"
    )
    assert run(light + "print('torch' in sys.modules)") == "False"
