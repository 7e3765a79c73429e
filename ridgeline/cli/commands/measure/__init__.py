"""Commands that measure: bench, diagnose, compare, top, mock-server."""
