"""Step time."""
