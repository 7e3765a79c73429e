"""Kernels in Triton for CUDA devices. Their modules import triton, this package does not.

`why_not` states why a device cannot run them; `load` imports one of the modules or raises
CannotRun. With TRITON_INTERPRET=1, set before triton is first imported, they run on the CPU in
Triton's interpreter, thousands of times slower, which is how they are tested without a GPU.

All kernels can be captured in a CUDA graph once they have been compiled by an eager call: grids
depend on shapes alone, lengths are read on the device, and nothing waits for it.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from ridgeline.errors import CannotRun

if TYPE_CHECKING:
    import torch

INTERPRET_VARIABLE = "TRITON_INTERPRET"
FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs (Ada) whose instructions convert E4M3."""


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get(INTERPRET_VARIABLE, "0").lower() in ("1", "true", "on", "yes")


def why_not(device: torch.device) -> tuple[str, ...]:
    """Reasons why Triton kernels cannot run on `device`; empty if they can."""
    if find_spec("triton") is None:
        return ("triton is not installed (pip install ridgeline[cuda])",)
    if device.type == "cuda" or (device.type == "cpu" and is_interpreted()):
        return ()
    return (f"Triton kernels run on CUDA devices, not on {device}",)


def why_no_fp8(device: torch.device) -> tuple[str, ...]:
    """Reasons why kernels cannot read and write E4M3 on a CUDA device; empty if they can."""
    import torch

    capability = torch.cuda.get_device_capability(device)
    if capability >= FP8_CAPABILITY:
        return ()
    return (f"needs compute capability 8.9 for fp8, not {capability[0]}.{capability[1]}",)


def load(module: str) -> ModuleType:
    """The module `module` of this package. Raises CannotRun if triton is not installed."""
    if find_spec("triton") is None:
        raise CannotRun("Triton kernels need triton", fix="pip install 'ridgeline[cuda]'")
    return importlib.import_module(f"{__name__}.{module}")
