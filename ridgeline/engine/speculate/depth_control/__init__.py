"""Depth control."""
