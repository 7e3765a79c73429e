"""Quantisation methods: how integers (and scales) are chosen."""
