"""Native kernels behind plain functions on tensors. Each has a slow twin in torch that its tests compare with."""
