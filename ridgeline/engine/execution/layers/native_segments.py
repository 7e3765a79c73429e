"""Writes the operators between a decoder's attentions into native segments.

    stage 0       embed · norm+quantise · qkv · rope
    stage 1 … N-1 quantise · o · norm+quantise · gate_up · gate+quantise · down · norm+quantise ·
                  qkv · rope
    stage N       … · down · norm

If attention is native as well, keys and values are written to the cache during rotation, attention
follows as one more operator, and all stages form a single segment.

A segment borrows the memory of weights and norm gains, which the decoder body keeps alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

import ridgeline._native as _native
from ridgeline.engine.attention.native import NativeAttention, sinks_argument
from ridgeline.engine.model.base import DecoderBody
from ridgeline.engine.model.layers import (
    AttentionLayer,
    Block,
    GatedMlp,
    Norm,
    QkNorm,
    QkRowNorm,
    RmsNorm,
    ScaledBranch,
    UngatedMlp,
    attention_of,
    no_norm,
    no_qk_norm,
)
from ridgeline.engine.model.moe import MoeMlp, SharedExpertMlp
from ridgeline.engine.model.rope import rotate_interleaved_
from ridgeline.engine.model.table import PackedTable, PlainTable
from ridgeline.engine.quant.base import Linear
from ridgeline.engine.quant.dense import DenseLinear
from ridgeline.engine.quant.packed import PackedLinear

ROWS = "norm+residual+quantise"
"""What a profile calls all operators on rows: norms, residual adds and quantisation."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operator: its name in a profile, and how it is added to a segment."""

    name: str
    write: Callable[[_native.FusedSegment], None]
    kept: object = None  # borrowed by the segment and otherwise not kept alive


def segment_of(*ops: Op) -> _native.FusedSegment:
    """Build a segment of the operators."""
    segment = _native.FusedSegment()
    for op in ops:
        op.write(segment)
        segment.mark(op.name)
    return segment


def heads_of(layer: AttentionLayer) -> tuple[int, int, int]:
    """(query heads, key heads, head_dim)."""
    return layer.num_heads, layer.num_kv_heads, layer.head_dim


def stages(body: DecoderBody, attention: NativeAttention | None = None) -> list[list[Op]]:
    """The operators before each attention and after the last one.

    With `attention`, each stage but the last ends with it.
    """
    writer = _Writer(body, attention)
    complete, ops = [], [writer.embed()]
    branch: Norm | None = None
    for layer, block in enumerate(body.blocks):
        complete.append([*ops, *writer.before_attention(layer, block, branch)])
        ops = list(writer.after_attention(block))
        branch = block.branch_norms[1]
    return [*complete, [*ops, writer.rows(body.norm, branch, None)]]


class SplitBlock(NamedTuple):
    """A block as segments that begin with rows in the caller's memory, given as `attended`.

    `heads` writes q, k and v; `output` the branch of attention's result and `mlp` that of the
    feed-forward layer, both to `out`. `norms` are those of the branches, from `attended` to `out`
    (None: there is none).
    """

    heads: _native.FusedSegment
    output: _native.FusedSegment
    mlp: _native.FusedSegment
    norms: tuple[_native.FusedSegment | None, _native.FusedSegment | None]


def split_block(body: DecoderBody, block: Block, o: Linear, down: Linear) -> SplitBlock:
    """The segments of a block without experts, whose last products are `o` and `down`."""
    writer, mlp = _Writer(body, None), block.mlp
    assert isinstance(mlp, GatedMlp | UngatedMlp)
    qkv = _packed(attention_of(block.attention).qkv)
    gate_up = _packed(mlp.gate_up if isinstance(mlp, GatedMlp) else mlp.up)
    output, last = _packed(o), _packed(down)
    gated = (_address(gate_up), mlp.activation, _address(last))
    rows = partial(writer.rows, source="attended")
    return SplitBlock(
        segment_of(rows(block.attention_norm, None, qkv), *writer.heads(0, block)),
        segment_of(writer.attention_output(output), _linear("o", output, "out")),
        segment_of(
            rows(block.mlp_norm, None, gate_up),
            Op("gate_up", lambda s: s.gate_up(*gated)),
            Op("activation", lambda s: s.gate(*gated)),
            _linear("down", last, "out", gated=True),
        ),
        (writer.branch_norm(block.branch_norms[0]), writer.branch_norm(block.branch_norms[1])),
    )


def norm_segment(body: DecoderBody, norm: Norm) -> _native.FusedSegment | None:
    """A norm of rows from `attended` to `out`; None if there is none."""
    return _Writer(body, None).branch_norm(norm)


class _Writer:
    def __init__(self, body: DecoderBody, attention: NativeAttention | None) -> None:
        self.body, self.eps, self.size = body, body.spec.norm_eps, body.spec.hidden_size
        self.attention = attention

    def embed(self) -> Op:
        table, scale = self.body.table, self.body.embed_scale
        if isinstance(table, PackedTable):
            address = table.native.address
            return Op("embed", lambda s: s.embed_packed(address, scale))
        assert isinstance(table, PlainTable)
        table_VC = table.embed_VC
        assert table_VC.is_contiguous() and table_VC.dtype in (torch.bfloat16, torch.float32)
        num_tokens, width = table_VC.shape
        is_bf16, at = table_VC.dtype == torch.bfloat16, table_VC.data_ptr()
        return Op("embed", lambda s: s.embed(at, is_bf16, num_tokens, width, scale))

    def before_attention(self, layer_index: int, block: Block, branch: Norm | None) -> Iterator[Op]:
        """Up to the block's attention. `branch` is the norm of the previous block's MLP branch."""
        yield self.rows(block.attention_norm, branch, _packed(attention_of(block.attention).qkv))
        yield from self.heads(layer_index, block)

    def heads(self, layer_index: int, block: Block) -> Iterator[Op]:
        """q, k and v of normed rows, and the attention where it is native."""
        layer = attention_of(block.attention)
        qkv = _packed(layer.qkv)
        num_heads, num_keys, head_dim = heads_of(layer)
        assert qkv.native.packed.num_out == (num_heads + 2 * num_keys) * head_dim
        yield _linear("qkv", qkv, "qkv")
        q_gain, k_gain = _head_gains(layer)
        shape = (num_heads, num_keys, num_heads + 2 * num_keys, head_dim)
        rope_args = (*shape, block.rope, q_gain, k_gain, self.eps)
        kinds = _rope_kinds(layer)
        if self.attention is None:
            yield Op("rope", lambda s: s.rope(*rope_args, None, "auto", **kinds))
            return
        owner, place = self.attention, self.attention.place(layer_index)
        group: dict[str, Any] = {}
        if owner.groups[layer_index]:
            group["group"] = owner.groups[layer_index]
        stored = kinds | group
        yield Op("rope+kv_write", lambda s: s.rope(*rope_args, place, owner.isa, **stored))
        site = owner.attentions[layer_index]
        assert heads_of(layer) == (site.num_heads, site.num_kv_heads, site.head_dim)
        window, softcap = site.window or 0, site.softcap or 0.0
        sinks = (sinks_argument(*layer.sinks) if layer.sinks else {}) | group
        yield Op(
            "attention",
            lambda s: s.attend(place, num_heads, site.scale, window, softcap, owner.isa, **sinks),
        )

    def after_attention(self, block: Block) -> Iterator[Op]:
        """After the block's attention: output projection, residual, feed-forward."""
        o, mlp = _packed(attention_of(block.attention).o), block.mlp
        assert o.native.packed.num_out == self.size
        yield self.attention_output(o)
        yield _linear("o", o, "branch")
        if isinstance(mlp, MoeMlp | SharedExpertMlp):
            yield self.rows(block.mlp_norm, block.branch_norms[0], None, "normed")
            yield _experts(mlp if isinstance(mlp, MoeMlp) else mlp.routed, self.size)
            if isinstance(mlp, SharedExpertMlp):
                yield from _shared_expert(mlp, self.size)
            return
        assert isinstance(mlp, GatedMlp | UngatedMlp)
        gate_up = _packed(mlp.gate_up if isinstance(mlp, GatedMlp) else mlp.up)
        down = _packed(mlp.down)
        assert down.native.packed.num_out == self.size
        yield self.rows(block.mlp_norm, block.branch_norms[0], gate_up)
        gated = (_address(gate_up), mlp.activation, _address(down))
        yield Op("gate_up", lambda s: s.gate_up(*gated))
        yield Op("activation", lambda s: s.gate(*gated))
        yield _linear("down", down, "branch", gated=True)

    def attention_output(self, o: PackedLinear) -> Op:
        """Attention's output in the input format of the output projection."""
        width, into = o.native.packed.num_in, _address(o)
        return Op(
            ROWS,
            lambda s: s.rows("attended", width, False, 0, False, 0, 0.0, into, "normed"),
        )

    def branch_norm(self, branch: Norm) -> _native.FusedSegment | None:
        """The norm of a branch from `attended` to `out`, apart from its scale."""
        norm = branch.norm if isinstance(branch, ScaledBranch) else branch
        if norm is no_norm:
            return None
        return segment_of(self.rows(norm, None, None, source="attended"))

    def rows(
        self,
        norm: Norm,
        branch: Norm | None,
        into: PackedLinear | None,
        to: str = "out",
        source: str = "residual",
    ) -> Op:
        """Add `branch`, if any, to the residual; return its norm in the input format of `into`.

        Without `into`, the norm is in floats. `source`: the slot that stands for the residual.
        """
        add, scale = branch is not None, {}
        if isinstance(branch, ScaledBranch):
            scale, branch = {"branch_scale": branch.factor}, branch.norm
        branch_gain = 0 if branch is None else _gain(branch)
        gain, weight = _gain(norm), 0 if into is None else _address(into)
        normed, size, eps = norm is not no_norm, self.size, self.eps
        return Op(
            ROWS,
            lambda s: s.rows(
                source, size, add, branch_gain, normed, gain, eps, weight, to, **scale
            ),
        )


def _linear(name: str, linear: PackedLinear, to: str, gated: bool = False) -> Op:
    """With `gated`, the input rows are those prepared by the activation."""
    weight = _address(linear)
    return Op(name, lambda s: s.linear(weight, to, gated))


def _experts(mlp: MoeMlp, size: int) -> Op:
    """The routed experts. The router is small and multiplied in float32."""
    pairs = [(_packed(expert.gate_up), _packed(expert.down)) for expert in mlp.experts]
    gate_up, down = ([_address(linear) for linear in side] for side in zip(*pairs, strict=True))
    router_EC, bias_E = _router_weight(mlp.router)
    bias = 0 if bias_E is None else bias_E.data_ptr()
    assert router_EC.shape == (len(pairs), size)
    at, num_chosen, norm_topk = router_EC.data_ptr(), mlp.num_chosen, mlp.norm_topk
    activation, correction_E = mlp.experts[0].activation, mlp.correction_E
    sigmoid, factor = mlp.routing.scoring == "sigmoid", mlp.routing.scale
    added = 0 if correction_E is None else correction_E.data_ptr()
    chosen = (size, num_chosen, norm_topk, activation, bias, added, sigmoid, factor)
    return Op(
        "router+experts", lambda s: s.experts(at, gate_up, down, *chosen), (router_EC, bias_E)
    )


def _shared_expert(mlp: SharedExpertMlp, size: int) -> Iterator[Op]:
    """The expert of every token, over the rows of the routed ones, added to their sum."""
    name = "shared_expert"
    gate_up, down = _packed(mlp.shared.gate_up), _packed(mlp.shared.down)
    assert down.native.packed.num_out == size
    into = _address(gate_up)
    yield Op(name, lambda s: s.rows("normed", size, False, 0, False, 0, 0.0, into, "normed"))
    gated = (into, mlp.shared.activation, _address(down))
    yield Op(name, lambda s: s.gate_up(*gated))
    yield Op(name, lambda s: s.gate(*gated))
    yield Op(name, lambda s: s.linear(_address(down), "expert_rows", True))
    router_1C = None if mlp.router is None else _router_weight(mlp.router)[0]
    at = 0 if router_1C is None else router_1C.data_ptr()
    yield Op(name, lambda s: s.add_shared_expert(at, size), router_1C)


def _router_weight(router: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The router's weight [E, C] and bias [E] as contiguous float32."""
    if type(router) is PackedLinear:
        native = router.native
        assert native.packed.kind in ("bf16", "fp32")
        return native.rows(torch.arange(native.packed.num_out)), native.bias_O
    assert type(router) is DenseLinear
    weight_EC, bias_E = router.weight_OI, router.bias_O
    assert weight_EC.dtype == torch.float32
    return weight_EC.contiguous(), None if bias_E is None else bias_E.float().contiguous()


def _packed(linear: object) -> PackedLinear:
    assert type(linear) is PackedLinear, linear
    return linear


def _address(linear: PackedLinear) -> int:
    return linear.native.address


def _gain(norm: Norm) -> int:
    """Address of the gain; 0 if there is no norm."""
    if norm is no_norm:
        return 0
    assert type(norm) is RmsNorm
    gain_C = norm.gain_C
    assert gain_C.dtype == torch.float32 and gain_C.is_contiguous()
    return gain_C.data_ptr()


def _rope_kinds(layer: AttentionLayer) -> dict[str, Any]:
    """What the norm and rotation of q and k have that most models do not."""
    kinds = {
        "norm_rows": isinstance(layer.norm_qk, QkRowNorm),
        "interleaved": layer.rotate is rotate_interleaved_,
    }
    return {name: True for name, holds in kinds.items() if holds}


def _head_gains(layer: AttentionLayer) -> tuple[int, int]:
    """Addresses of the gains of q heads and of k heads; 0 without a norm."""
    if layer.norm_qk is no_qk_norm:
        return 0, 0
    if isinstance(layer.norm_qk, QkRowNorm):
        q_gain, k_gain = layer.norm_qk.q_gain, layer.norm_qk.k_gain
        assert q_gain.dtype == torch.float32 and q_gain.is_contiguous() and k_gain.is_contiguous()
        return q_gain.data_ptr(), k_gain.data_ptr()
    assert type(layer.norm_qk) is QkNorm
    gain_XD = layer.norm_qk.gain_XD
    assert gain_XD.dtype == torch.float32 and gain_XD.is_contiguous()
    return gain_XD.data_ptr(), gain_XD[layer.num_heads].data_ptr()
