"""INT8 linears (W8A8): 8-bit weights, activations rounded to 8 bits row by row at run time.

y = W x becomes (s_o · t) · Σ q_oi · p_i with integers q, p in [-127, 127], one scale s_o per output
row (fixed at load) and one scale t = max|x| / 127 per input row (computed at run time). The sum is
exact in int32; all error comes from rounding W and x. Compared with fp32 a step reads a quarter of
the bytes, and CPUs that multiply bytes do more work per cycle.

Source: Dettmers et al., "LLM.int8()" (2022) for vector-wise scales; Xiao et al., "SmoothQuant"
(2022) for per-token activations. Outlier features are not treated here: they widen t and cost
accuracy.

Invariant: row t of the result depends on row t of x alone. (PyTorch's `quantized::linear_dynamic`
breaks this: it uses one activation scale for the whole batch, so a response would depend on its
batch. The kernels below are called with integers and a fixed scale of 1 instead.)

The kernels are our own and those of PyTorch. They differ by an order of magnitude in speed, and on
x86 without VNNI PyTorch's are wrong for large values: `vpmaddubsw` adds two u8·s8 products in 16
bits and saturates. So each kernel is verified to be exact on this machine before use, first with
full-range scales, then with pair-safe ones, and the fastest that passes is used.

The LM head stays in the compute dtype. Measured on the demo model and its held-out text: INT8
layers differ from fp32 by a KL divergence of 1.1e-3 and agree with its greedy choice at 97.7 % of
positions; an INT8 head alone cost 1.2e-4 on the first demo model, and a model whose head is tied to
its embeddings would keep both.

When it loses: with a kernel that needs `RowScaled`, small layers, whose element-wise calls cost
more than the bytes saved; models with strong activation outliers.
"""

from ridgeline.engine.quant.int8.linear import Int8Linear

__all__ = ["Int8Linear"]
