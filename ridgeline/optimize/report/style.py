"""Which class of the style sheet a verdict wears. The colours themselves are in style.css."""

from __future__ import annotations

VERDICT_CSS = {
    "kept": "good",
    "unchanged": "flat",
    "inconclusive": "flat",
    "cut short": "flat",
    "regressed": "bad",
    "quality failed": "bad",
    "not exact": "bad",
    "cannot run": "bad",
    "crashed": "bad",
}
