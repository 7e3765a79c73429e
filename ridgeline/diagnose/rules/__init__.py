"""Causes, rules and decisions: TOML data and the code that evaluates it."""
