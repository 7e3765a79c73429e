"""Trains drafters (Medusa, EAGLE) for speculative decoding."""
