"""The style sheet's class of each verdict."""

from __future__ import annotations

VERDICT_CSS = {
    "kept": "good",
    "unchanged": "flat",
    "inconclusive": "flat",
    "cut short": "flat",
    "reverted": "bad",
    "regressed": "bad",
    "quality failed": "bad",
    "not exact": "bad",
    "cannot run": "bad",
    "crashed": "bad",
}
