"""Where phases and operators are under the roofline."""
