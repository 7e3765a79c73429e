"""Drafter training."""
