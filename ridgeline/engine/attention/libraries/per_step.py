"""What a library needs once per step and kind of layer: masks and plans."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any


class PerStep:
    """Keeps what was made for the present tables of decoding rows, and for those of prompts.

    A mixed step has tables of both types, which its layers use in turn.
    """

    def __init__(self) -> None:
        self._made: dict[type, tuple[object, dict[Hashable, Any]]] = {}

    def get(self, tables: object, kind: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returned for this kind of layer and these tables."""
        held = self._made.get(type(tables))
        if held is None or held[0] is not tables:
            held = self._made[type(tables)] = (tables, {})
        _, by_kind = held
        if kind not in by_kind:
            by_kind[kind] = make()
        return by_kind[kind]
