"""Parallel layouts of one replica over devices, and the communication that they need.

    tp   tensor parallel: every matrix and the heads split over `tp` devices; two all-reduces per
         layer
    pp   pipeline parallel: the layers in `pp` stages, which pass activations on
    ep   expert parallel: whole experts on `ep` devices; two all-to-alls per routed layer. ep > tp:
         the attention is replicated ep / tp times, each with its own sequences ("wide" EP)
    dp   separate replicas, which the fleet search counts; they exchange nothing

Times are those of a ring: 2(n-1)/n · bytes / link for an all-reduce, (n-1)/n · bytes / link for an
all-to-all, and a constant per collective. Nothing is assumed to overlap with computation. Traffic
between nodes of 8 devices runs at the network's rate: 400 Gbit/s per device, according to the data
sheets of DGX H100 and HGX systems from 2023 to 2026.
"""

from __future__ import annotations

import msgspec

from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.modelspec.cost.parameters import count_layers
from ridgeline.modelspec.model import MlpSpec, ModelSpec

NODE_DEVICES = 8
NETWORK_BYTES_S = 50e9


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Degrees of tensor, pipeline and expert parallelism of one replica.

    `ep` 1: experts are split by tp like other matrices. `ep` > `tp`: attention is replicated.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def num_attention(self) -> int:
        """Number of attention replicas, each with different sequences."""
        return max(1, self.ep // self.tp)

    @property
    def num_devices(self) -> int:
        return self.pp * self.tp * self.num_attention

    def __str__(self) -> str:
        parts = (
            [f"tp{self.tp}"] + [f"pp{self.pp}"] * (self.pp > 1) + [f"ep{self.ep}"] * (self.ep > 1)
        )
        return " ".join(parts)


def check_layout(layout: Layout, spec: ModelSpec, device: Accelerator) -> None:
    """Raise BadInput or CannotRun if the model or the device does not allow the layout."""
    for name in ("tp", "pp", "ep"):
        if getattr(layout, name) < 1:
            raise BadInput(f"{name} must be positive", value=getattr(layout, name), limit=">= 1")
    if layout.tp > NODE_DEVICES:
        raise CannotRun("tp beyond one node is not modelled", value=layout.tp, limit=NODE_DEVICES)
    heads = min(layer.attention.num_heads for layer in spec.layers)
    if heads % layout.tp:
        raise CannotRun("tp must divide the attention heads", value=layout.tp, limit=heads)
    if layout.pp > len(spec.layers):
        raise CannotRun("more pipeline stages than layers", value=layout.pp, limit=len(spec.layers))
    if layout.ep > 1:
        _check_experts(layout, spec)
    if layout.num_devices > 1 and device.link_bytes_s is None:
        raise CannotRun(
            f"the link rate between {device.name} devices is unknown",
            value=str(layout),
            fix="use one device, or a catalogue that specifies link_gb_s",
        )


def _check_experts(layout: Layout, spec: ModelSpec) -> None:
    routed = _routed(spec)
    if not routed:
        raise CannotRun(f"{spec.name} has no experts to distribute", value=f"ep {layout.ep}")
    experts = min(mlp.num_experts for mlp, _ in routed)
    if experts % layout.ep:
        raise CannotRun("ep must divide the experts", value=layout.ep, limit=experts)
    if layout.ep % layout.tp:
        raise CannotRun("ep must be a multiple of tp", value=layout.ep, limit=f"tp {layout.tp}")


def _routed(spec: ModelSpec) -> list[tuple[MlpSpec, int]]:
    """Routed MLPs, and the number of layers in which each occurs."""
    return [(layer.mlp, n) for layer, n in count_layers(spec).items() if layer.mlp.num_experts]


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of communication of one pass over the model, as a + b · tokens."""

    fixed_s: float
    per_token_s: float

    def seconds(self, num_tokens: int) -> float:
        return self.fixed_s + self.per_token_s * num_tokens


def communication(
    layout: Layout, spec: ModelSpec, device: Accelerator, collective_s: float, act_bytes: int
) -> Communication:
    """Communication of one attention group's tokens in one pass; zero on one device.

    `collective_s` is the fixed cost of a collective, `act_bytes` the size of an activation.
    """
    link_bytes_s = device.link_bytes_s or 1.0  # unused on one device
    row_s = spec.hidden_size * act_bytes / link_bytes_s if layout.num_devices > 1 else 0.0
    slower = max(1.0, link_bytes_s / NETWORK_BYTES_S) if layout.num_devices > NODE_DEVICES else 1.0
    fixed_s = per_token_s = 0.0
    routed = _routed(spec)
    spread_layers = sum(n for _, n in routed) if layout.ep > 1 else 0
    if layout.tp > 1:
        times = 2 * len(spec.layers) - spread_layers
        fixed_s += times * collective_s
        per_token_s += times * 2 * (layout.tp - 1) / layout.tp * row_s
    if spread_layers:
        fixed_s += 2 * spread_layers * collective_s
        sent = sum(n * mlp.experts_per_token for mlp, n in routed)
        far = slower if layout.ep > NODE_DEVICES else 1.0
        per_token_s += far * 2 * sent * (layout.ep - 1) / layout.ep * row_s / layout.tp
    if layout.pp > 1:
        fixed_s += (layout.pp - 1) * collective_s
        per_token_s += slower * (layout.pp - 1) * row_s / layout.tp
    return Communication(fixed_s=fixed_s, per_token_s=per_token_s)
