"""Admission: per-request limits, queue limits, and moving sequences from a queue into a slot."""
