"""Measures steps: totals per step while serving, and times by operator on request."""
