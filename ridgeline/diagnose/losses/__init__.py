"""Latency by cause: where the time of each request went, from step records or from outside."""
