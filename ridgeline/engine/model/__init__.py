"""The decoder: its layers, rotary embeddings, embedding tables and mixture of experts."""
