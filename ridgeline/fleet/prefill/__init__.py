"""Prompts computed by other servers than the answers."""
