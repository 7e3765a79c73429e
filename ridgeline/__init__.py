"""Ridgeline: makes LLM inference faster and cheaper, and proves it.

Importing this package is cheap (no torch): `ridgeline.generate` and `ridgeline.Engine` are
resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.2.0"
__all__ = ["Engine", "Sampling", "__version__", "generate"]

if TYPE_CHECKING:
    from ridgeline.engine.engine import Engine, generate
    from ridgeline.records import Sampling

_HOMES = {
    "Engine": "ridgeline.engine.engine",
    "generate": "ridgeline.engine.engine",
    "Sampling": "ridgeline.records",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
