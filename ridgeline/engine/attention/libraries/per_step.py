"""What a library needs once per step and kind of layer: masks and plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

TABLES_PER_STEP = 3
"""Those of decoding rows, of prompts in chunks, and of prompts whose layers read the cache."""


class PerStep:
    """Keeps what was made for the tables of the present step, which its layers use in turn."""

    def __init__(self) -> None:
        self._made = deque[tuple[object, dict[Hashable, Any]]](maxlen=TABLES_PER_STEP)

    def get(self, tables: object, kind: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returned for this kind of layer and these tables."""
        by_kind = next((made for own, made in self._made if own is tables), None)
        if by_kind is None:
            by_kind = {}
            self._made.append((tables, by_kind))
        if kind not in by_kind:
            by_kind[kind] = make()
        return by_kind[kind]
