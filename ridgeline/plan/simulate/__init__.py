"""Discrete-event simulation of replicas and fleets, driven by the engine's scheduler."""
