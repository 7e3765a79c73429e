"""Other people's quantised checkpoints: one codec per layout, one source of weights over all.

    base.py         what a codec is, and the registry · words.py whole numbers out of 32-bit words
    gptq.py awq.py compressed.py scaled.py bnb.py     the codecs
    weights.py      `ForeignWeights`: decodes part by part, packs where a kernel fits

Formats are named in `ridgeline.modelspec.checkpoints.quantised`; nothing here guesses: a tensor that contradicts its
config is an error.
"""

from ridgeline.engine.checkpoints.quantized_checkpoint import ForeignWeights, foreign_in

__all__ = ["ForeignWeights", "foreign_in"]
