"""Loads sent to an engine or a server, and what is observed meanwhile."""
