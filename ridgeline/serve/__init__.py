"""The OpenAI-compatible server: HTTP into requests, events into HTTP. It decides nothing."""
