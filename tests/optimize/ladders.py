"""The ladder of one rung with which tests search whole servers."""

from __future__ import annotations

MORE_SLOTS = """
[[rung]]
id = "slots"
title = "More slots"
technique = "continuous-batching"
variants = [{ max_num_seqs = %d }]
honesty = "exact"
term = "sequences per step"
risk = 0
complexity = 0
why = "More slots shorten the queue."
hurts_when = "Each step takes longer."
"""
