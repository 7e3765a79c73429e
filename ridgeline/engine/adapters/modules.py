"""Which products of a decoder adapters can add to, by the module names of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ridgeline.engine.checkpoints.family_layouts import LAYOUTS
from ridgeline.modelspec.cost.adapters import adapted_linears
from ridgeline.modelspec.model import ModelSpec

SITES = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
"""Keys whose weights are one product: they read the same input."""


Site = tuple[int, tuple[str, ...]]
"""A layer, and the keys of the linears that one product computes there."""


class AdaptedModule(NamedTuple):
    """A module of the model: its layer, and the linears that its rows are, in order."""

    layer: int
    keys: tuple[str, ...]


def why_no_adapters(spec: ModelSpec) -> str | None:
    """Why no adapter can be added to this model; None if one can."""
    if spec.family not in LAYOUTS:
        return f"the module names of {spec.family} are unknown"
    if not any(adapted_linears(layer) for layer in spec.layers):
        return "it has neither plain attention nor dense feed-forward layers"
    return None


def modules_of(spec: ModelSpec) -> dict[str, AdaptedModule]:
    """The modules by their path from `layers.N.` on."""
    return dict(_modules(spec))


def _modules(spec: ModelSpec) -> Iterator[tuple[str, AdaptedModule]]:
    layout = LAYOUTS[spec.family][0]
    for index, layer in enumerate(spec.layers):
        for key in adapted_linears(layer):
            place = layout[key]
            if place.stacked or place.transposed or place.interleaved or place.grouped:
                continue
            name = place.template.format(layer=index).removesuffix(".weight")
            yield name[name.index("layers.") :], AdaptedModule(index, place.fused or (key,))
