"""Makes models smaller by removing parts of them: layers, channels, heads, single weights."""
