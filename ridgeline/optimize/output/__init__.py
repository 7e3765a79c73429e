"""Writes results: configuration files, command lines, numbers as text."""
