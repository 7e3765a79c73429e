"""What stands between a stranger and the engine: keys, limits, and a suspicious front door."""
