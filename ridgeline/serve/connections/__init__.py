"""Connections of clients: their limits of number, time and size."""
