"""Parallel layouts of one replica over devices, and the communication that they need.

    tp   tensor parallel: every matrix and the heads split over `tp` devices
    dp   attention data parallel: `dp` groups of `tp` devices, each with its own sequences, share
         the experts
    pp   pipeline parallel: the layers in `pp` stages, which pass activations on
    cp   context parallel: `cp` times as many devices, which divide the KV cache of every sequence
         by positions, and rows of models without experts; with cp > 1, ep is 1 or tp · cp
    dcp  decode context parallel: of the tp devices, which outnumber the KV heads, those that would
         store the same keys divide them by positions, and gather each other's queries (vLLM's
         --decode-context-parallel-size)
    sp   sequence parallel: the tp devices of a layer each normalise a part of the rows, so that an
         all-reduce becomes a reduce-scatter and an all-gather: the same bytes, two messages
    ep   expert parallel: whole experts on `ep` of the tp · dp devices; the others split each
         expert's matrices (tp · dp / ep ways). ep > tp implies dp = ep / tp ("wide" EP)

Separate replicas are counted by the fleet search and exchange nothing.

Times are those of rings: after attention an all-reduce over tp, after the MLP one over tp · dp,
2(n-1)/n · bytes / (link · share) each, and a latency that grows with the devices of a node (each of
them is waited for) and with the logarithm of the number of nodes. Nothing is assumed to overlap
with computation. Traffic between nodes of 8 devices runs at the network's rate
(`Accelerator.network_bytes_s`).
"""

from __future__ import annotations

import math

import msgspec

from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.modelspec.cost.parameters import count_layers, num_kv_heads
from ridgeline.modelspec.cost.serving_formats import quantised_as
from ridgeline.modelspec.format import FP8_BLOCK
from ridgeline.modelspec.model import AttentionSpec, LinearSpec, MlpSpec, ModelSpec
from ridgeline.plan.calibration.published_efficiency import Efficiency

NODE_DEVICES = 8
_BLOCK = 128  # rows and inputs that share a scale in FP8_BLOCK


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Degrees of tensor, pipeline, expert, attention data and context parallelism of one replica.

    `ep` 1: experts are split like other matrices. `ep` > `tp`: attention is replicated. Each of
    `cp` groups of `tp` devices holds an equal part of every sequence's KV cache. `sp`: devices of a
    group each normalise a part of the rows. `dcp` of the `tp` devices divide the keys that they
    would all store.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    cp: int = 1
    dcp: int = 1
    sp: bool = False

    @property
    def num_attention(self) -> int:
        """Number of attention replicas, each with different sequences."""
        return self.dp if self.cp > 1 else max(self.dp, self.ep // self.tp)

    @property
    def num_expert_devices(self) -> int:
        """Devices over which the experts of a layer are spread."""
        return self.tp * self.num_attention * (self.cp if self.ep > 1 else 1)

    @property
    def num_devices(self) -> int:
        return self.pp * self.tp * self.num_attention * self.cp

    def __str__(self) -> str:
        parts = (
            [f"tp{self.tp}"]
            + [f"dp{self.dp}"] * (self.dp > 1)
            + [f"pp{self.pp}"] * (self.pp > 1)
            + [f"ep{self.ep}"] * (self.ep > 1)
            + [f"cp{self.cp}"] * (self.cp > 1)
            + [f"dcp{self.dcp}"] * (self.dcp > 1)
            + ["sp"] * self.sp
        )
        return " ".join(parts)


def layout_from(
    spec: ModelSpec,
    tp: int,
    pp: int,
    ep: int,
    attention_dp: int,
    moe_tp: int | None,
    cp: int = 1,
) -> Layout:
    """The layout by the numbers that engines take. `moe_tp` None: what `ep` leaves; 1 for a model
    without experts.

    Where `moe_tp` · `ep` exceeds `tp` · `attention_dp`, attention is data parallel over the rest.
    Raises BadInput if the two do not describe the same devices.
    """
    if min(tp, pp, ep, attention_dp, moe_tp or 1) < 1:
        raise BadInput(
            "a degree of parallelism must be positive",
            value=f"tp {tp}, pp {pp}, ep {ep}, attention_dp {attention_dp}, moe_tp {moe_tp}",
            limit=">= 1",
        )
    if not _routed(spec) and moe_tp in (1, tp):
        moe_tp = None
    if moe_tp is None or moe_tp * ep == tp * attention_dp:
        return Layout(tp=tp, pp=pp, ep=ep, dp=attention_dp, cp=cp)
    if attention_dp == 1 and moe_tp * ep > tp and moe_tp * ep % tp == 0:
        return Layout(tp=tp, pp=pp, ep=ep, dp=moe_tp * ep // tp, cp=cp)
    raise BadInput(
        "experts and attention are laid out over different numbers of devices",
        value=f"moe_tp {moe_tp} x ep {ep}",
        limit=f"tp {tp} x attention_dp {attention_dp}",
        fix="make the products equal, or leave moe_tp out",
    )


def check_layout(
    layout: Layout, spec: ModelSpec, device: Accelerator, weight_dtype: str | None = None
) -> None:
    """Raise BadInput or CannotRun if the model or the device does not allow the layout.

    `weight_dtype` None: the checkpoint's own, whose groups and blocks the shards must not cut.
    """
    for name in ("tp", "pp", "ep", "dp", "cp", "dcp"):
        if getattr(layout, name) < 1:
            raise BadInput(f"{name} must be positive", value=getattr(layout, name), limit=">= 1")
    heads = min(layer.attention.num_heads for layer in spec.layers)
    if heads % layout.tp:
        raise CannotRun("tp must divide the attention heads", value=layout.tp, limit=heads)
    if layout.pp > len(spec.layers):
        raise CannotRun("more pipeline stages than layers", value=layout.pp, limit=len(spec.layers))
    if layout.dp > 1 and not _routed(spec):
        raise CannotRun(
            f"{spec.name} has no experts to share between attention groups",
            value=f"dp {layout.dp}",
            fix="use separate replicas",
        )
    if layout.ep > 1:
        _check_experts(layout, spec)
    if layout.cp > 1 and (layout.dp > 1 or layout.ep not in (1, layout.tp * layout.cp)):
        raise CannotRun(
            "context parallelism has one attention group, and whole experts on all of its devices",
            value=str(layout),
            limit=f"dp 1, ep 1 or {layout.tp * layout.cp}",
        )
    if layout.dcp > 1:
        copies = layout.tp // num_kv_heads(spec)
        if layout.tp % layout.dcp or layout.dcp > copies or layout.cp > 1:
            raise CannotRun(
                "decode context parallelism divides keys that several tp devices would store",
                value=str(layout),
                limit=f"dcp divides tp, is at most {max(1, copies)}, and excludes cp",
            )
    if layout.sp and layout.tp == 1:
        raise CannotRun(
            "sequence parallelism divides rows between the devices that layers are split over",
            value=str(layout),
            limit="tp >= 2",
            fix="leave it out",
        )
    if weight_dtype in (None, quantised_as(spec)):
        _check_shards(layout, spec)
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
    if layout.num_expert_devices % layout.ep or layout.ep > layout.num_expert_devices:
        raise CannotRun(
            "ep must divide the devices of the experts",
            value=layout.ep,
            limit=f"tp {layout.tp} x {layout.num_attention} attention groups",
        )


def _check_shards(layout: Layout, spec: ModelSpec) -> None:
    """Engines refuse a checkpoint whose groups, or FP8 blocks, lie on two devices."""
    for layer in count_layers(spec):
        a, m = layer.attention, layer.mlp
        kv_parts = min(layout.tp, a.num_kv_heads)
        sharded = [("attention output", a.o, a.o.num_in, layout.tp)]
        if a.latent is not None or not _straddles(a.k.num_out // max(1, a.num_kv_heads)):
            sharded += [("query projection", a.q, a.q.num_out, layout.tp)] * _in_blocks(a.q)
            sharded += [("key projection", a.k, a.k.num_out, kv_parts)] * _in_blocks(a.k)
        parts = layout.num_expert_devices // layout.ep if m.num_experts else layout.tp
        sharded += [("feed-forward layer", m.down, m.down.num_in, parts)]
        sharded += [("feed-forward layer", m.up, m.up.num_out, parts)] * _in_blocks(m.up)
        for name, linear, size, parts in sharded:
            is_cuttable = linear.format.kind in ("dense", "mxfp4")  # engines pad MXFP4's shards
            group = None if is_cuttable else linear.format.group_size
            group = _BLOCK if linear.format.kind == FP8_BLOCK.kind else group
            if group and parts > 1 and size // parts % group:
                raise CannotRun(
                    f"tp would cut a quantisation group of the {name}",
                    value=f"{size} / {parts} = {size // parts}",
                    limit=f"a multiple of {group}",
                    fix="lower tp"
                    + (", or distribute whole experts with ep" if m.num_experts else ""),
                )


def _straddles(head_size: int) -> bool:
    """Whether heads of a size begin within blocks, which engines then divide themselves."""
    return head_size % _BLOCK != 0 and _BLOCK % max(1, head_size) != 0


def _in_blocks(linear: LinearSpec) -> bool:
    """Whether rows share scales too, as in FP8 with blocks; elsewhere groups run along inputs."""
    return linear.format.kind.startswith((FP8_BLOCK.kind, "float8_e4m3-b"))


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
    layout: Layout,
    spec: ModelSpec,
    device: Accelerator,
    eff: Efficiency,
    *,
    act_bytes: int,
) -> Communication:
    """Communication of one attention group's tokens in one pass; zero on one device.

    `eff` holds the latency of a collective and the share of the link's rate that it reaches;
    `act_bytes` is the size of an activation.
    """
    fixed_s = per_token_s = 0.0
    if layout.num_devices == 1:
        return Communication(fixed_s=fixed_s, per_token_s=per_token_s)
    row_s = spec.hidden_size * act_bytes / ((device.link_bytes_s or 1.0) * eff.link)
    slower = max(1.0, (device.link_bytes_s or 1.0) / device.network_bytes_s)
    groups = layout.num_attention
    # Context groups of models without experts compute different rows.
    rows = 1.0 if _routed(spec) else 1 / layout.cp
    for num_devices, tokens in ((layout.tp, rows), (layout.num_expert_devices, groups * rows)):
        if num_devices > 1:
            times = len(spec.layers)
            far = slower if num_devices > device.link_devices else 1.0
            fixed_s += times * (2 if layout.sp else 1) * _latency_s(num_devices, eff)
            per_token_s += far * times * tokens * 2 * (num_devices - 1) / num_devices * row_s
    if layout.cp > 1:
        # Queries, keys and values of all rows, and the partial softmaxes of a chunk.
        far = slower if layout.cp > device.link_devices else 1.0
        attentions = [layer.attention for layer in spec.layers]
        heads = sum(a.q.num_out + a.k.num_out + a.v.num_out for a in attentions)
        partials = sum(a.num_heads * (a.head_dim + 2) for a in attentions)
        fixed_s += 2 * len(spec.layers) * _latency_s(layout.cp, eff)
        share = (layout.cp - 1) / layout.cp / layout.tp
        per_token_s += far * share * (heads + partials) / spec.hidden_size * row_s
    if layout.dcp > 1:
        # The queries of the group's heads, and their results with a log-sum-exp each.
        heads = sum(_decode_numbers(layer.attention) for layer in spec.layers)
        fixed_s += 3 * len(spec.layers) * _latency_s(layout.dcp, eff)
        per_token_s += (layout.dcp - 1) / layout.tp * heads / spec.hidden_size * row_s
    if layout.pp > 1:
        far = slower if layout.num_devices > device.link_devices else 1.0
        fixed_s += (layout.pp - 1) * eff.collective_s
        per_token_s += far * (layout.pp - 1) * row_s / layout.tp
    return Communication(fixed_s=fixed_s, per_token_s=per_token_s)


def _decode_numbers(attention: AttentionSpec) -> int:
    """Numbers of a row's queries and of their results, of all heads of a layer."""
    latent, heads = attention.latent, attention.num_heads
    if latent is None:
        return heads * (2 * attention.head_dim + 1)
    return heads * (2 * latent.rank + latent.rope_dim + 1)


def _latency_s(num_devices: int, eff: Efficiency) -> float:
    """Seconds of a collective without bytes."""
    nodes = max(1.0, num_devices / NODE_DEVICES)
    return (min(num_devices, NODE_DEVICES) - 1 + math.log2(nodes)) * eff.collective_s
