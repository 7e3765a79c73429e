"""Tables of the commands that measure: bench, compare, diagnose, top."""
