"""Prediction, sizing, simulation and pricing, from the model's spec and the engine's scheduler."""
