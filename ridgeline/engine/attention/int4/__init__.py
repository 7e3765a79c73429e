"""A KV cache in 4 bits: keys by channel, values by token, recent tokens in INT8 (KIVI)."""
