"""Params."""
