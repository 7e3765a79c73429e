"""Speculative decoding: draft several tokens cheaply and verify them in one step.

  drafters/       n-gram and suffix lookup, draft model, layer skip, Medusa, EAGLE, lookahead
  depth_control/  how deep to draft for which sequence, from measured costs
  token_tree.py   trees of drafts
  config.py       resolves the user's speculative config
  build.py        builds what scheduler and runner need

The registry names the drafters and imports none before it is chosen.
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
