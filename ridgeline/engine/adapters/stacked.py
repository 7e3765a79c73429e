"""Adapters as stacked matrices: products of fixed shapes, which a CUDA graph can repeat.

What. The A of all adapters that can be loaded lie one after the other, and so do their B. A step
multiplies every row by all of A, keeps what belongs to the row's own adapter, and multiplies by all
of B: two products per linear, whatever the adapters of the step are.

Source. The masked form of Punica's grouped products (Chen et al. 2023, arXiv 2310.18547).

Invariant. Row t is y_t + B (A x_t) of its own adapter alone: a masked product adds zeros.

When it loses. Every step reads all stacked adapters, loaded or not: with many of a large rank, more
than the base model saves by running from a graph. The memory comes on top of the adapters' own.

Shape suffixes: L adapters, R rank, I inputs, O outputs, T rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.adapters.modules import SITES, Site
from ridgeline.engine.adapters.weights import AdapterWeights
from ridgeline.modelspec.cost.adapters import adapted_linears
from ridgeline.modelspec.model import ModelSpec


class _SiteStack:
    """All adapters at one site: a part of A and of B for each linear there."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, int]],
        num_adapters: int,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        num_in = next(iter(shapes.values()))[1]

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        self.down_LKRI = zeros(num_adapters, len(shapes), rank, num_in)
        self.up_LRO: dict[str, Tensor] = {}
        self.columns: dict[str, slice] = {}
        at = 0
        for key, (num_out, _) in shapes.items():
            self.up_LRO[key] = zeros(num_adapters, rank, num_out)
            self.columns[key] = slice(at, at + num_out)
            at += num_out

    @property
    def nbytes(self) -> int:
        return self.down_LKRI.nbytes + sum(up.nbytes for up in self.up_LRO.values())

    def add_to(self, y_TO: Tensor, x_TI: Tensor, mask_TL: Tensor) -> None:
        num_adapters, num_keys, rank, num_in = self.down_LKRI.shape
        low_TX = x_TI @ self.down_LKRI.view(-1, num_in).T
        low_TLKR = low_TX.view(-1, num_adapters, num_keys, rank) * mask_TL[:, :, None, None]
        for index, (key, columns) in enumerate(self.columns.items()):
            up_XO = self.up_LRO[key].flatten(0, 1)
            y_TO[:, columns] += low_TLKR[:, :, index].flatten(1) @ up_XO


class AdapterStack:
    """The stacked adapters of a model, by site."""

    def __init__(
        self,
        spec: ModelSpec,
        num_adapters: int,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_adapters, self.device, self.dtype = num_adapters, device, dtype
        self._sites: dict[Site, _SiteStack] = {}
        for layer, own in enumerate(spec.layers):
            linears = adapted_linears(own)
            for keys in SITES:
                present = [key for key in keys if key in linears]
                shapes = {key: (linears[key].num_out, linears[key].num_in) for key in present}
                if shapes:
                    stack = _SiteStack(shapes, num_adapters, rank, device, dtype)
                    self._sites[layer, keys] = stack

    @property
    def nbytes(self) -> int:
        return sum(site.nbytes for site in self._sites.values())

    def put(self, place: int, weights: AdapterWeights) -> None:
        """Copy an adapter to a place; what it does not have becomes zero."""
        for (layer, keys), site in self._sites.items():
            site.down_LKRI[place] = 0.0
            for index, (key, up_LRO) in enumerate(site.up_LRO.items()):
                up_LRO[place] = 0.0
                if (layer, key) not in weights or key not in keys:
                    continue
                down_RI, up_OR = weights[layer, key]
                site.down_LKRI[place, index, : len(down_RI)] = down_RI.to(self.dtype)
                up_LRO[place, : len(down_RI)] = up_OR.T.to(self.dtype)

    def mask(self, places_T: Tensor) -> Tensor:
        """mask_TL of rows that use the adapters at these places; a negative one uses none."""
        places_L = torch.arange(self.num_adapters, device=self.device)
        return (places_T.unsqueeze(1) == places_L).to(self.dtype)

    def add_to(self, site: Site, y_TO: Tensor, x_TI: Tensor, mask_TL: Tensor) -> None:
        """Add what each row's adapter adds at a site."""
        stack = self._sites.get(site)
        if stack is not None:
            stack.add_to(y_TO, x_TI, mask_TL)
