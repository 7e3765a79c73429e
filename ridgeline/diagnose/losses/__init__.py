"""Latency by cause: what each request's time was lost to, from step records or from outside."""
