"""Compares two configurations by measuring them in alternation."""
