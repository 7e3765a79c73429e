"""One decoder, built from a ModelSpec, and the reading of its weights. See `decoder` and `load`."""
