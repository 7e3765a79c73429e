"""Script-free SVG drawings: scales, axes with units, marks and bars.

Elements carry classes instead of colours, so that one drawing serves light and dark pages, and a
`<title>` where a reader may want the exact number. A drawing that would become illegible on a phone
is drawn twice, for wide and for narrow screens (`figure`); the style sheet shows one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

import msgspec
from markupsafe import Markup

WIDE, NARROW = 960, 340
"""Widths in pixels: of a page's column, and of a phone without its margins."""
TICK_WIDTH, TICK_HEIGHT = 58, 38  # pixels between tick labels, at least


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """Maps a value in [low, high] to a pixel in [start, end]; `log` for a logarithmic axis."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, -0.02), 1.02) * (self.end - self.start)

    def ticks(self, spacing: float = TICK_WIDTH) -> tuple[float, ...]:
        """Values to label, at least about `spacing` pixels apart."""
        most = max(2, int(abs(self.end - self.start) / spacing))
        if not self.log:
            return nice_ticks(self.low, self.high, min(5, most))
        ticks = log_ticks(self.low, self.high)
        return ticks if len(ticks) <= 1.5 * most else log_ticks(self.low, self.high, (1,))


def nice_ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """Round numbers at equal distances inside [low, high]."""
    raw = (high - low) / count
    unit = 10 ** math.floor(math.log10(raw))
    step = unit * next((m for m in (1, 2, 2.5, 5, 10) if m * unit >= raw), 10)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(i * step for i in range(first, last + 1))


def log_ticks(
    low: float, high: float, multiples: tuple[int, ...] | None = None
) -> tuple[float, ...]:
    """`multiples` of powers of ten; by default 1, 2 and 5 on axes of less than three decades."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    chosen = multiples or ((1, 2, 5) if high / low < 1000 else (1,))
    ticks = (m * 10.0**d for d in decades for m in chosen)
    return tuple(x for x in ticks if low * (1 - 1e-9) <= x <= high * (1 + 1e-9))


def element(tag: str, css: str = "", inner: str = "", **attributes: object) -> str:
    """One element. Underscores in attribute names become hyphens, floats have two decimals."""
    words = [tag, f'class="{css}"'] if css else [tag]
    words += [f'{name.replace("_", "-")}="{_short(value)}"' for name, value in attributes.items()]
    return f"<{' '.join(words)}>{inner}</{tag}>" if inner else f"<{' '.join(words)}/>"


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def text(x: float, y: float, content: str, css: str = "", anchor: str = "start") -> str:
    return element("text", css, escape(content), x=x, y=y, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return element("line", css, x1=x1, y1=y1, x2=x2, y2=y2)


def rect(x1: float, y: float, x2: float, height: float, css: str, tip: str = "") -> str:
    left, width = min(x1, x2), max(abs(x2 - x1), 1.5)
    inner = title(tip) if tip else ""
    return element("rect", css, inner, x=left, y=y, width=width, height=height, rx=2.5)


def path(points: Sequence[tuple[float, float]], css: str) -> str:
    steps = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return element("path", css, d=f"M{steps}")


def mark(shape: str, x: float, y: float, size: float, css: str, tip: str = "") -> str:
    """A circle, square or diamond around (x, y)."""
    inner = title(tip) if tip else ""
    if shape == "circle":
        return element("circle", css, inner, cx=x, cy=y, r=size)
    if shape == "square":
        side = 1.8 * size
        return element("rect", css, inner, x=x - side / 2, y=y - side / 2, width=side, height=side)
    corner = 1.35 * size
    d = f"M{x:.1f} {y - corner:.1f} L{x + corner:.1f} {y:.1f} L{x:.1f} {y + corner:.1f} "
    return element("path", css, inner, d=d + f"L{x - corner:.1f} {y:.1f} Z")


def x_axis(scale: Scale, top: float, bottom: float, label: str, fmt: str = "g") -> str:
    """Grid lines, tick labels and the axis title with its unit, below the plot."""
    parts = []
    for tick in scale.ticks(TICK_WIDTH):
        x = scale(tick)
        parts.append(line(x, top, x, bottom, "grid"))
        parts.append(text(x, bottom + 16, tick_text(tick, fmt), "tick", "middle"))
    parts.append(line(scale.start, bottom, scale.end, bottom, "axis"))
    middle = (scale.start + scale.end) / 2
    parts.append(text(middle, bottom + 36, label, "axis-title", "middle"))
    return "".join(parts)


def y_axis(scale: Scale, left: float, right: float, label: str, fmt: str = "g") -> str:
    """Grid lines and tick labels; the title is horizontal, above the axis."""
    parts = []
    for tick in scale.ticks(TICK_HEIGHT):
        y = scale(tick)
        parts.append(line(left, y, right, y, "grid"))
        parts.append(text(left - 8, y + 4, tick_text(tick, fmt), "tick", "end"))
    parts.append(text(2, min(scale.start, scale.end) - 14, label, "axis-title"))
    return "".join(parts)


def tick_text(value: float, fmt: str) -> str:
    if fmt == "%":
        return f"{100 * value:.0f}%"
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:{fmt}}"


def drawing(width: int, height: int, label: str, *parts: str) -> Markup:
    """The whole picture; `label` is what a screen reader reads out."""
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" '
        f'preserveAspectRatio="xMidYMid meet">{"".join(parts)}</svg>'
    )


def figure(draw: Callable[[int], str], wide: int = WIDE) -> Markup:
    """`draw(width)` for wide and for narrow screens; empty if it draws nothing."""
    if not (drawn := draw(wide)):
        return Markup()
    return Markup(
        f'<div class="figure wide">{drawn}</div><div class="figure narrow">{draw(NARROW)}</div>'
    )
