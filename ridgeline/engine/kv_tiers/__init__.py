"""Tiers of the KV cache outside the pool: host memory, files, and object stores."""
