"""Numbers as people read them."""

from __future__ import annotations


def three_digits(value: float) -> str:
    """Three significant digits, without exponents: 0.0123, 44.6, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
