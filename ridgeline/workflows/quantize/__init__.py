"""Quantise models and train drafters for them."""
