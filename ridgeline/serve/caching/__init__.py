"""What clients may say about the prefix cache: pin, warm, limit and forget."""
