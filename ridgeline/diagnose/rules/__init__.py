"""The rule book and the decision flowchart: TOML data and the code that evaluates it."""
