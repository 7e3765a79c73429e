"""Fewer tokens from the documents of a request: duplicates, their order, lossy compression."""
