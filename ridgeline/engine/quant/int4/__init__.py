"""INT4 linears (W4A8): 4-bit weights in groups, activations rounded to 8 bits at run time.

Each group of 32, 64 or 128 inputs of an output has an fp16 scale and optionally a zero-point: w =
(q - z) · s with q in 0..15 (z = 8 without zero-points). A row of activations is rounded to int8
with one scale per group of its inputs, so a group's product is a sum of integers, exact in int32;
groups are added in float32. A step reads an eighth of fp32's bytes.

Source: group-wise rounding to nearest is the common base of GPTQ (Frantar et al. 2022), AWQ (Lin et
al. 2023) and llama.cpp's Q4 formats; the search for the scale of least error is that of MSE
clipping (Banner et al. 2018). int8 activations per group: llama.cpp's Q8 rows.

Invariant: beyond the family's, a row's result is bitwise the same in any batch, on any number of
threads and on every ISA (native/linear/linear.h states the order of reduction).

When it loses: small models, whose outputs change visibly; weights that fit in cache; many rows,
where compute rather than bandwidth is the bound and the gain over INT8 is smaller.
"""

from ridgeline.engine.quant.int4.linear import Int4Linear

__all__ = ["Int4Linear"]
