"""What will it take: predictions from the spec, the machine and the engine's own scheduler."""
