"""Servers: start one, answer a batch file without one, watch one, or script one."""
