"""GGUF files: reading, decoding and packing of their block types."""
