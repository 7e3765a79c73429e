"""Numbers as people read them."""

from __future__ import annotations


def rounded(value: float, digits: int = 3) -> str:
    """Rounded to rounded digits, large ones without exponents: 0.0123, 44.6, 12,345."""
    if abs(value) >= 10**digits - 0.5:
        return f"{value:,.0f}"
    return f"{value:,.{digits}g}"
