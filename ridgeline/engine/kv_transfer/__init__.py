"""KV blocks between servers: a prefill server computes a prompt, a decode server fetches it."""
