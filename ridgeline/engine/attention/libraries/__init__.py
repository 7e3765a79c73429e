"""Attention by libraries: torch's FlexAttention, and FlashInfer where it is installed."""
