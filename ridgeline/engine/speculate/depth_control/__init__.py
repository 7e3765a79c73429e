"""Decides how many tokens to draft for each sequence."""
