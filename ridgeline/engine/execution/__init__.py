"""Turns step plans into tokens on a device: runner, layer backends, threads."""
