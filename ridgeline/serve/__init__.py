"""The OpenAI-compatible server: HTTP into asks, events into HTTP. It decides nothing."""
