"""Several servers as one: a gateway that routes, relays and resumes."""
