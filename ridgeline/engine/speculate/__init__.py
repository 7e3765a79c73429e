"""Speculative decoding: guess several tokens cheaply, verify them in one step.

The registry names the drafters; none is imported until it is chosen (`assemble.py`). What the
scheduler knows of it is in `ridgeline.engine.core.drafting`.
"""

from __future__ import annotations

DRAFTERS = {
    "ngram": "ridgeline.engine.speculate.ngram:NgramDrafter",
    "suffix": "ridgeline.engine.speculate.suffix:SuffixDrafter",
    "lookahead": "ridgeline.engine.speculate.lookahead:LookaheadDrafter",
    "auto": "ridgeline.engine.speculate.combined:Combined",
    "draft_model": "ridgeline.engine.speculate.draft_model:DraftModelDrafter",
    "self": "ridgeline.engine.speculate.layer_skip:SelfDrafter",
    "medusa": "ridgeline.engine.speculate.medusa:MedusaDrafter",
    "eagle": "ridgeline.engine.speculate.eagle:EagleDrafter",
}
