"""The engine: `core` decides (no torch), the rest computes; `engine.py` is its face."""
