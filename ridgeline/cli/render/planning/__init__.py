"""Tables of the planning commands."""
