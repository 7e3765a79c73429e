"""Reads checkpoints: plain safetensors, quantised formats of other projects, GGUF, and our packed
form.

  load.py                  from a model's name and spec to a decoder with its weights
  sources.py               weight sources: a safetensors checkpoint, or random weights
  tensor_names.py          where each family stores its tensors
  codecs/                  quantised layouts: GPTQ, AWQ, compressed-tensors, bitsandbytes, FP8
  quantized_checkpoint.py  decodes them part by part and packs where a kernel fits
  gguf/                    GGUF files
  packed.py, write_packed.py  our own packed form

Formats are named in the model spec; nothing is guessed: a tensor that contradicts its config is an
error.
"""

from ridgeline.engine.checkpoints.quantized_checkpoint import QuantizedWeights, read_quantisation

__all__ = ["QuantizedWeights", "read_quantisation"]
