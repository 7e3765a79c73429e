"""Profiling."""
