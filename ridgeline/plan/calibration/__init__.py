"""Step-time models fitted to measurements of an engine or a server."""
