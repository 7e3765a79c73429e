"""Native kernels behind plain functions on tensors; each is tested against a slow twin."""
