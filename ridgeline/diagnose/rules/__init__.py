"""Causes, rules and decisions as data (TOML), and the code that evaluates their conditions."""
