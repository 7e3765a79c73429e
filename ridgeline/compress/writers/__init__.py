"""Writes quantised checkpoints in the formats of this engine and of others."""
