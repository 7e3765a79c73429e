"""Configurations of a server that runs on Kubernetes: changed in place, or tried on a copy."""
