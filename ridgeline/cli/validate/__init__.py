"""Checks of options and output paths, made before a command runs."""
