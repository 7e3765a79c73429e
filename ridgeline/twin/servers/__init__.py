"""Twins of other servers: their command lines, defaults, start-up and metrics, as data."""
