"""Exchanges among the ranks of a model, behind one interface."""
