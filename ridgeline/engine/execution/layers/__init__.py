"""Registry of layer backends: name -> "module:Class". Nothing is imported until chosen.

A new one is one file here and one line in `BACKENDS`, and, if it should be chosen by default, its
name in `AUTO` (best first). `torch` is the oracle and runs on every device and dtype.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from ridgeline.errors import BadInput, CannotRun

if TYPE_CHECKING:
    import torch

    from ridgeline.engine.model.base import LayerBackend
    from ridgeline.modelspec.model import ModelSpec

BACKENDS = MappingProxyType(
    {
        "native": "ridgeline.engine.execution.layers.native:NativeForward",
        "triton": "ridgeline.engine.execution.layers.fused:TritonForward",
        "compiled": "ridgeline.engine.execution.layers.fused:CompiledForward",
        "adapted": "ridgeline.engine.execution.layers.adapted:AdaptedForward",
        "torch": "ridgeline.engine.execution.layers.torch_ops:TorchForward",
    }
)
AUTO = ("native", "triton", "torch")


def layer_backend_of(name: str) -> LayerBackend:
    """The class behind `name`. Raises BadInput with the known names."""
    if name not in BACKENDS:
        raise BadInput("unknown layer backend", value=name, limit=", ".join(("auto", *BACKENDS)))
    module, _, cls = BACKENDS[name].partition(":")
    backend: LayerBackend = getattr(import_module(module), cls)
    return backend


def choose(
    requested: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> tuple[str, tuple[str, ...]]:
    """The backend to use and the reasons.

    Raises CannotRun if the one requested by name cannot run.
    """
    if requested != "auto":
        why_not = layer_backend_of(requested).why_not(spec, device, dtype)
        if why_not:
            raise CannotRun(
                f"layer backend {requested!r} cannot run here: {'; '.join(why_not)}",
                value=requested,
                fix="use --layer-backend auto",
            )
        return requested, ("as requested",)
    rejected: list[str] = []
    for name in AUTO:
        why_not = layer_backend_of(name).why_not(spec, device, dtype)
        if not why_not:
            return name, (*rejected, f"{name}: the fastest that runs on {device.type}")
        rejected.append(f"not {name}: {'; '.join(why_not)}")
    raise CannotRun(f"no layer backend runs here: {' | '.join(rejected)}")
