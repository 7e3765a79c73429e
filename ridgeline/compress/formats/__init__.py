"""Numeric formats: where a quantised weight may lie, and its bytes."""
