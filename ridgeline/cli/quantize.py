"""`ridgeline quantize MODEL`: write its weights in fewer bits, packed as the engine reads them."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from ridgeline.errors import BadInput
from ridgeline.spec.cost import resident_weight_bytes
from ridgeline.spec.format import BF16, INT8, Format, int4
from ridgeline.spec.load import load_spec
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.rewrite import apply_formats, with_dtype


def command(
    model: str,
    output: Path,
    bits: int,
    group_size: int | None,
    zero_points: bool,
    lm_head_bits: int | None,
) -> int:
    """Round, pack and write; the exit code. Raises BadInput, BadModel, CannotRun."""
    begun = perf_counter()
    spec = formats_for(model, bits, group_size, zero_points, lm_head_bits)
    from ridgeline.engine.model.pack import pack_model

    written = pack_model(model, spec, output)
    print(f"{model}: {written / 1e6:,.1f} MB in {output}, {perf_counter() - begun:.1f} s")
    for line in spec.rewrites:
        print(f"  {line}")
    print(f"  in memory when opened: {resident_weight_bytes(spec) / 1e6:,.1f} MB")
    print(f"Open it by its folder: ridgeline serve {output}")
    return 0


def formats_for(
    model: str, bits: int, group_size: int | None, zero_points: bool, lm_head_bits: int | None
) -> ModelSpec:
    """The model's spec with the formats that were asked for."""
    if bits != 4 and (group_size is not None or zero_points):
        raise BadInput("groups and zero-points are for 4 bits", value=f"--bits {bits}")
    layers = _format(bits, group_size or 128, zero_points)
    spec = with_dtype(load_spec(model), "float32")
    head = lm_head_bits or (16 if spec.stored_dtype == "bfloat16" else None)
    formats = {"layers.*.attention.*": layers, "layers.*.mlp.*": layers}
    if head is not None:
        formats["lm_head"] = _format(head, group_size or 128, zero_points)
    return apply_formats(spec, formats, f"quantize --bits {bits}, round to nearest")


def _format(bits: int, group_size: int, zero_points: bool) -> Format:
    if bits == 4:
        return int4(group_size, zeros=zero_points)
    return {8: INT8, 16: BF16}[bits]
