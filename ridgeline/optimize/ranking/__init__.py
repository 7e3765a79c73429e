"""Predicts the gain of every rung and decides which to try next."""
