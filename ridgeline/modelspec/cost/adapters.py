"""Which linears LoRA adapters can add to."""

from __future__ import annotations

from ridgeline.modelspec.model import LayerSpec, LinearSpec

ATTENTION, MLP = ("q", "k", "v", "o"), ("gate", "up", "down")


def adapted_linears(layer: LayerSpec) -> dict[str, LinearSpec]:
    """The linears of a layer that adapters can add to, by key.

    Plain attention and dense feed-forward only: latent attention, delta nets and experts have none.
    """
    attention, mlp = layer.attention, layer.mlp
    keys: list[str] = []
    if attention.latent is None and attention.delta is None and not attention.gated:
        keys += ("q", "o") if attention.shares_kv else ATTENTION
    if mlp.router is None:
        keys += MLP if mlp.gated else MLP[1:]
    return {key: getattr(attention if key in ATTENTION else mlp, key) for key in keys}
