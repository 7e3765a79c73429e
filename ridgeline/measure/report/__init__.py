"""A run as a page, as a Chrome trace, and as the console block of `vllm bench serve`."""
