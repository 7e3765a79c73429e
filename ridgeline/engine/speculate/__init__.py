"""Speculative decoding: guess several tokens cheaply, verify them in one step.

The registry names the drafters; none is imported until it is chosen (`assemble.py`). What the
scheduler knows of it is in `ridgeline.engine.scheduler.speculation.draft_scheduler`.
"""

from __future__ import annotations

DRAFTERS = {
    "ngram": "ridgeline.engine.speculate.drafters.ngram:NgramDrafter",
    "suffix": "ridgeline.engine.speculate.drafters.suffix:SuffixDrafter",
    "lookahead": "ridgeline.engine.speculate.drafters.lookahead:LookaheadDrafter",
    "auto": "ridgeline.engine.speculate.drafters.combined:Combined",
    "draft_model": "ridgeline.engine.speculate.drafters.draft_model:DraftModelDrafter",
    "self": "ridgeline.engine.speculate.drafters.layer_skip:SelfDrafter",
    "medusa": "ridgeline.engine.speculate.drafters.medusa:MedusaDrafter",
    "eagle": "ridgeline.engine.speculate.drafters.eagle:EagleDrafter",
}
