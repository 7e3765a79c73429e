"""KV eviction in the runner: which models can evict, and which tokens are kept by their scores."""
