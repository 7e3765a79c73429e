"""Access control: API keys, rate limits, and the checks before any route."""
