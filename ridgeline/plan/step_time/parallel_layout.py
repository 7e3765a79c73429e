"""How one replica of a model lies on devices, and what its parts have to tell each other.

    tp   tensor parallel: every matrix and the heads split over `tp` devices; two all-reduces per
         layer
    pp   pipeline: the layers in `pp` stages; activations are handed on between them
    ep   expert parallel: whole experts on `ep` devices; two all-to-alls per routed layer. ep > tp:
         the attention is replicated ep / tp times, each with its own sequences ("wide" EP)
    dp   replicas are the fleet's business: nothing is exchanged between them

Times are those of a ring: 2(n-1)/n · bytes / link for an all-reduce, (n-1)/n · bytes / link for an
all-to-all, and a constant per collective. Nothing is assumed to overlap with computation. What
goes between nodes of 8 devices goes at the network's rate: 400 Gbit/s per device, as the data
sheets of DGX H100 and HGX systems of 2023 to 2026 have it.
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
    """See the head of this file. `ep` 1: experts are split like every other matrix."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def num_attention(self) -> int:
        """Groups of devices that each attend for sequences of their own."""
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
    """BadInput or CannotRun, with the number that does not go."""
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
            f"no rate of a link between {device.name} devices is known",
            value=str(layout),
            fix="use one device, or name a catalogue that tells link_gb_s",
        )


def _check_experts(layout: Layout, spec: ModelSpec) -> None:
    routed = _routed(spec)
    if not routed:
        raise CannotRun(f"{spec.name} has no experts to spread", value=f"ep {layout.ep}")
    experts = min(mlp.num_experts for mlp, _ in routed)
    if experts % layout.ep:
        raise CannotRun("ep must divide the experts", value=layout.ep, limit=experts)
    if layout.ep % layout.tp:
        raise CannotRun("ep must be a multiple of tp", value=layout.ep, limit=f"tp {layout.tp}")


def _routed(spec: ModelSpec) -> list[tuple[MlpSpec, int]]:
    """Routed MLPs, and in how many layers each occurs."""
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
