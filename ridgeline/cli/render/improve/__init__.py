"""Reports of `optimize`, its advice, and `watch`."""
