"""Routes that change the adapters of a running server."""
