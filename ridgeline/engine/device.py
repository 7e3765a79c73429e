"""The device that an engine runs on, or the reason why it cannot.

Names are read here and not by PyTorch, which keeps a device's number in eight bits: it takes
`cuda:256` for `cuda:0`.
"""

from __future__ import annotations

import os
import re

import torch

from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import find_accelerator

NO_ROCM = (
    "use --device cpu: the GPU kernels are written and measured for NVIDIA cards only, and none has"
    " run on an AMD card"
)
NO_KERNELS = "use --device cpu: the engine has kernels for CPUs and for NVIDIA GPUs only"
OTHER_DEVICES = {
    "rocm": NO_ROCM,
    "hip": NO_ROCM,
    "mps": "use --device cpu: paged attention and the quantised formats have no Metal kernels, and"
    " nothing of the engine has run on an Apple GPU",
    "xpu": NO_KERNELS,
    "hpu": NO_KERNELS,
    "npu": NO_KERNELS,
    "tpu": NO_KERNELS,
    "xla": NO_KERNELS,
    "vulkan": NO_KERNELS,
}
"""Why devices that other engines run on are refused, and what to use."""

NAMES = "auto, cpu, cuda or cuda:N"


def choose_device(asked: str, why: dict[str, str]) -> torch.device:
    """The device of this name, and in `why` how it was chosen.

    Raises BadInput for a name of no device, CannotRun for a device that cannot be used here.
    """
    has_cuda = torch.cuda.is_available() and torch.version.hip is None
    if asked == "auto":
        why["device"] = (
            "auto: a CUDA device is available" if has_cuda else "auto: no CUDA device is available"
        )
        return torch.device("cuda" if has_cuda else "cpu")
    why["device"] = "as requested"
    if asked in ("cpu", "cpu:0"):  # there is one CPU, and PyTorch counts it from 0
        return torch.device("cpu")
    name, colon, number = asked.partition(":")
    if name in OTHER_DEVICES:
        raise CannotRun(
            "the device is not supported",
            value=asked,
            limit="cpu, cuda",
            fix=OTHER_DEVICES[name],
        )
    if name != "cuda" or (colon and not re.fullmatch(r"\d{1,6}", number, re.ASCII)):
        raise BadInput("unknown device", value=asked, limit=NAMES, fix=_what_is_meant(name, number))
    if torch.version.hip is not None:
        raise CannotRun("ROCm is not supported", value=asked, limit="cpu, cuda", fix=NO_ROCM)
    if int(number or 0) >= torch.cuda.device_count():
        raise CannotRun(
            "no such CUDA device", value=asked, limit=_visible(), fix=_why_not_visible()
        )
    return torch.device("cuda", int(number)) if colon else torch.device("cuda")


def _what_is_meant(name: str, number: str) -> str:
    """What to do with a name that is none of a device."""
    if name == "cpu":
        return "use --device cpu: --num-threads says how many of its cores"
    if name.lower() in ("gpu", "nvidia", "cuda") or name.isdecimal():
        return f"use --device cuda{f':{name}' if name.isdecimal() else ''}"
    try:
        row = find_accelerator(name)
    except BadInput:
        return "`ridgeline doctor` shows what this machine has"
    count = f":{number}" if number else ""
    return (
        f"{row.name} is a row of the catalogue: `ridgeline serve MODEL --twin --device "
        f"{row.name}{count}` imitates it, the planning commands take --accelerator; "
        "to run on a GPU of this machine use --device cuda"
    )


def _visible() -> str:
    count = torch.cuda.device_count()
    return f"{count} CUDA device{'s' * (count != 1)} visible to this PyTorch"


def _why_not_visible() -> str:
    """What to do where a CUDA device is not visible."""
    if torch.version.cuda is None:
        build = f"torch {torch.__version__} is built without CUDA: install a build with it"
        return f"{build}, or use --device cpu"
    masked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if masked is not None:
        return f"CUDA_VISIBLE_DEVICES={masked!r} hides devices: change it, or use --device cpu"
    if not torch.cuda.device_count():
        return "look at `nvidia-smi`: without a driver there is no device; or use --device cpu"
    return "number devices from 0, or use --device cpu"
