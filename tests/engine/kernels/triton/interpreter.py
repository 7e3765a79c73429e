"""Triton's interpreter, repaired where it computes wrongly or slowly, and the device of the tests.

The interpreter keeps bfloat16 as its bits and multiplies those in `tl.dot`; here they are widened
first. It also replaces all functions of the language again for every call of a function of a
kernel, which takes most of the time; here it does so once.

RIDGELINE_TEST_DEVICE=cuda runs the same tests on a GPU, compiled.
"""

from __future__ import annotations

import os
from inspect import ismodule
from typing import Any

import numpy as np
import torch

DEVICE = torch.device(os.environ.get("RIDGELINE_TEST_DEVICE", "cpu"))


def repair_interpreter() -> None:
    """Change the interpreter of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    def widened(handle: Any) -> Any:
        if handle.dtype == tl.bfloat16:
            bits = handle.data.view(np.uint16).astype(np.uint32) << 16
            return bits.view(np.float32)
        return handle.data.astype(np.float32) if handle.dtype.is_floating() else handle.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: object) -> Any:
        product = np.matmul(widened(a), widened(b), dtype=d.data.dtype) + d.data
        return interpreter.TensorHandle(product, d.dtype.scalar)

    class NoScope:
        def restore(self) -> None:
            pass

    patch, patched = interpreter._patch_lang, set()

    def patch_once(fn: Any) -> NoScope:
        modules = [value for value in fn.__globals__.values() if ismodule(value)]
        key = frozenset(module.__name__ for module in modules if module in (tl, tl.core))
        if key not in patched:
            patch(fn)
            patched.add(key)
        return NoScope()

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._patch_lang = patch_once
