"""Model arithmetic: from a config to parameters, FLOPs and bytes. Imports no torch."""
