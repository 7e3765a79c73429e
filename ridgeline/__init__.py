"""Ridgeline: makes LLM inference faster and cheaper, and proves it.

The public API: every name in `__all__` is resolved on first use, so that importing this package is
cheap and imports no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from inspect import Signature

    from ridgeline.api.explain import explain
    from ridgeline.api.improve import evaluate, optimize, quantize
    from ridgeline.api.inspect import doctor, inspect
    from ridgeline.api.measure import bench, calibrate, casestudy, compare, diagnose
    from ridgeline.api.planning import (
        capacity,
        catalogue,
        cost,
        pack,
        plan,
        predict,
    )
    from ridgeline.api.server import serve
    from ridgeline.api.simulate import simulate
    from ridgeline.api.text import batch, chat, generate, stream
    from ridgeline.engine.engine import Engine
    from ridgeline.records import Sampling

__version__ = "0.2.0"
__all__ = [
    "Engine",
    "Sampling",
    "__version__",
    "batch",
    "bench",
    "calibrate",
    "capacity",
    "casestudy",
    "catalogue",
    "chat",
    "compare",
    "cost",
    "diagnose",
    "doctor",
    "evaluate",
    "explain",
    "generate",
    "inspect",
    "optimize",
    "pack",
    "plan",
    "predict",
    "quantize",
    "serve",
    "simulate",
    "stream",
]

_HOMES = {
    "Engine": "ridgeline.engine.engine",
    "Sampling": "ridgeline.records",
    "batch": "ridgeline.api.text",
    "bench": "ridgeline.api.measure",
    "calibrate": "ridgeline.api.measure",
    "capacity": "ridgeline.api.planning",
    "casestudy": "ridgeline.api.measure",
    "catalogue": "ridgeline.api.planning",
    "chat": "ridgeline.api.text",
    "compare": "ridgeline.api.measure",
    "cost": "ridgeline.api.planning",
    "diagnose": "ridgeline.api.measure",
    "doctor": "ridgeline.api.inspect",
    "evaluate": "ridgeline.api.improve",
    "explain": "ridgeline.api.explain",
    "generate": "ridgeline.api.text",
    "inspect": "ridgeline.api.inspect",
    "optimize": "ridgeline.api.improve",
    "pack": "ridgeline.api.planning",
    "plan": "ridgeline.api.planning",
    "predict": "ridgeline.api.planning",
    "quantize": "ridgeline.api.improve",
    "serve": "ridgeline.api.server",
    "simulate": "ridgeline.api.simulate",
    "stream": "ridgeline.api.text",
}
"""Public name → the module that defines it."""

_PACKAGES = {"diagnose", "optimize", "plan", "serve"}
"""Public functions that share their name with a subpackage."""


class _CallablePackage(ModuleType):
    """A subpackage that shares its name with a public function, which a call of it calls.

    `ridgeline.plan(...)` works whether or not `ridgeline.plan.…` has been imported before, and so
    do `import ridgeline.plan` and `from ridgeline.plan import …`. Type checkers see the function.
    """

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return _function(self)(*args, **keywords)

    @property
    def __signature__(self) -> Signature:
        from inspect import signature

        return signature(_function(self))


class _RootPackage(ModuleType):
    """This package: a subpackage that the import system binds to a public name becomes callable."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _PACKAGES and type(value) is ModuleType:
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _RootPackage


def _function(package: ModuleType) -> Callable[..., Any]:
    name = package.__name__.rpartition(".")[2]
    function: Callable[..., Any] = getattr(import_module(_HOMES[name]), name)
    return function


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    if name in _PACKAGES:
        return import_module(f"ridgeline.{name}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
