"""Scheduling of speculative drafts: what a step can carry and what became of it."""
