"""Native kernels as functions on tensors; each is tested against a slow reference."""
