"""Answers that are given again to the same request."""
