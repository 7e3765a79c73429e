"""Phases and operators under the roofline."""
