"""Codecs of quantised layouts written by other projects."""
