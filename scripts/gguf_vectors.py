"""Writes the frozen vectors of tests/engine/checkpoints/test_gguf.py.

They are random blocks of every type that is decoded, and what gguf-py decodes them to.

Runs in a separate environment, where gguf is installed.

    python scripts/gguf_vectors.py tests/engine/checkpoints/gguf_vectors.safetensors
"""

from __future__ import annotations

import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from safetensors.numpy import save_file

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
TYPES += ("IQ4_NL", "IQ4_XS", "MXFP4", "IQ2_XXS", "TQ1_0")


def main(target: str) -> None:
    rng, tensors = np.random.default_rng(0), {}
    for name in TYPES:
        kind = GGMLQuantizationType[name]
        blocks = rng.integers(0, 256, (3, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        tensors[f"{name}/blocks"] = blocks
        with np.errstate(all="ignore"):
            tensors[f"{name}/truth"] = quants.dequantize(blocks, kind).astype(np.float32)
    save_file(tensors, target)


if __name__ == "__main__":
    main(sys.argv[1])
