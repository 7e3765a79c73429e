"""Which linears LoRA adapters can add to, and how many weights that takes."""

from __future__ import annotations

from ridgeline.modelspec.model import LayerSpec, LinearSpec, ModelSpec

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


def adapter_params(spec: ModelSpec, rank: int) -> int:
    """Weights of one adapter on every linear that it can add to; 0 if there is none."""
    return rank * sum(
        linear.num_in + linear.num_out
        for layer in spec.layers
        for linear in adapted_linears(layer).values()
    )
