"""Where Ridgeline keeps its files: measurements of this machine, downloads, quantised models."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "RIDGELINE_CACHE"


def default_cache_dir() -> Path:
    """$RIDGELINE_CACHE, else $XDG_CACHE_HOME/ridgeline, else ~/.cache/ridgeline."""
    chosen = os.environ.get(CACHE_VARIABLE, "")
    if chosen:
        return Path(chosen).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return base / "ridgeline"
