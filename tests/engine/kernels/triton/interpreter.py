"""Triton's interpreter, repaired where it computes wrongly or slowly, and the device of the tests.

The interpreter keeps bfloat16 as its bits: it adds and multiplies those, takes integers for them,
and truncates where hardware rounds to nearest. Here torch converts and products are those of
the numbers. It also replaces all functions of the language again for every call of a function of a
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


class NoScope:
    """Stands for a scope in which nothing was replaced."""

    def restore(self) -> None:
        pass


def repair_interpreter() -> None:
    """Change the interpreter of this process."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    original_cast, original_binary = builder.cast_impl, builder.binary_op
    patch, patched = interpreter._patch_lang, set()

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: object) -> Any:
        product = np.matmul(_numbers(a), _numbers(b), dtype=d.data.dtype) + d.data
        return interpreter.TensorHandle(product, d.dtype.scalar)

    def cast_impl(self: Any, value: Any, target: Any) -> Any:
        types = _torch_dtypes()
        pair = (types.get(value.dtype.scalar), types.get(target.scalar))
        if torch.bfloat16 not in pair or None in pair:
            return original_cast(self, value, target)
        data = _convert(value.data, *pair).view(interpreter._get_np_dtype(target))
        return interpreter.TensorHandle(data, target.scalar)

    def binary_op(self: Any, a: Any, b: Any, operation: Any) -> Any:
        import triton.language as tl

        if a.dtype.scalar != tl.bfloat16 or b.dtype.scalar != tl.bfloat16:
            return original_binary(self, a, b, operation)
        result = operation(_numbers(a), _numbers(b))
        if result.dtype == np.bool_:
            return interpreter.TensorHandle(result, tl.int1)
        bits = _convert(result.astype(np.float32), torch.float32, torch.bfloat16)
        return interpreter.TensorHandle(bits, tl.bfloat16)

    def convert_float(data: Any, source: Any, target: Any, rounding: object) -> Any:
        types = _torch_dtypes()
        converted = _convert(data, types[source], types[target])
        return converted.view(f"uint{target.primitive_bitwidth}")

    def patch_once(fn: Any) -> NoScope:
        import triton.language as tl

        modules = [value for value in fn.__globals__.values() if ismodule(value)]
        key = frozenset(module.__name__ for module in modules if module in (tl, tl.core))
        if key not in patched:
            patch(fn)
            patched.add(key)
        return NoScope()

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.binary_op = binary_op
    for name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc"):
        setattr(builder, f"create_{name}", cast_impl)
    interpreter._convert_float = convert_float
    interpreter._patch_lang = patch_once


def _torch_dtypes() -> dict[Any, torch.dtype]:
    import triton.language as tl

    return {
        tl.float64: torch.float64,
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.int8: torch.int8,
        tl.uint8: torch.uint8,
        tl.int32: torch.int32,
        tl.int64: torch.int64,
    }


def _convert(data: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Numbers converted as torch does; bfloat16 and FP8 are bits in and bits out."""
    as_bytes = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8).copy())
    converted = as_bytes.view(source).to(target)
    numpy_type = {2: np.uint16, 1: np.uint8}.get(target.itemsize)
    if target.is_floating_point and numpy_type is None:
        numpy_type = np.float32 if target == torch.float32 else np.float64
    if not target.is_floating_point:
        return converted.numpy().reshape(data.shape)
    return converted.view(torch.uint8).numpy().view(numpy_type).reshape(data.shape)


def _numbers(handle: Any) -> Any:
    """The operand of a product as numbers that NumPy can multiply."""
    types = _torch_dtypes()
    if handle.dtype.is_floating():
        return _convert(handle.data, types[handle.dtype.scalar], torch.float32)
    return handle.data
