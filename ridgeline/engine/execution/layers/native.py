"""Layers as native segments, each running from one attention to the next in one parallel region.

What. Between two attentions lie the output projection, two residual adds, two norms, the gated
feed-forward and the next layer's q, k, v with their rotation. A segment (native/layer/segment.h)
runs all of it in one call: rows are normalised, gated and quantised while they are in the CPU
cache, directly into the input format of the next product. Threads claim pieces of work, so none
waits for a thread that wakes late.

    embed·norm·qkv·rope ─attention─ o·add·norm·gate_up·gate·down·add·norm·qkv·rope ─attention─ …

If attention is native too, it is an operator like the others and the step is a single segment:
Python is entered once per step and threads wake once. Any other attention is called between
segments.

Invariant. A row is bitwise the same whatever it is batched with, on any number of threads and every
ISA. native/layer/segment.h documents the order of summation; native/linear/linear.h documents that
of products, which differs on machines with tile instructions.

When it loses. Nowhere that it runs. It needs the CPU, float32 arithmetic and weights that can be
packed (dense ones can: quant/fp32.py).

Shape legend: T tokens, C hidden_size, H query heads, K key heads, D head_dim, X = H + 2·K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.attention.base import Attend
from ridgeline.engine.attention.native import NativeAttention, NativeStep
from ridgeline.engine.execution.layers.native_segments import Op, heads_of, segment_of, stages
from ridgeline.engine.kernels.native_linear import isa
from ridgeline.engine.model.base import DecoderBody
from ridgeline.engine.model.layers import attention_of
from ridgeline.modelspec.cost.kv_cache import has_states
from ridgeline.modelspec.format import FP32, Format
from ridgeline.modelspec.layer_inputs import why_torch_only
from ridgeline.modelspec.model import LinearSpec, ModelSpec
from ridgeline.modelspec.rewrite import linears

_KINDS = ("int4", "int8", "int8_sparse24", "blocks", "bf16", "fp32", "dense")


class NativeForward:
    """Runs a decoder's layers as native segments.

    One step at a time, because steps share a frame.
    """

    def __init__(self, body: DecoderBody) -> None:
        self.body = body
        self.num_threads: int | None = None  # None: torch's count at the start of each step
        self.frame = _native.FusedFrame(isa())
        layers = [attention_of(block.attention) for block in body.blocks]
        self.heads, self.sinks = tuple(map(heads_of, layers)), [layer.sinks for layer in layers]
        self.stages = stages(body)
        self.segments = tuple(segment_of(*ops) for ops in self.stages)
        self.whole: _WholeStep | None = None
        self.tables: tuple[Tensor, ...] = ()
        self.rope_tables: tuple[Tensor, ...] = ()  # `tables` as the frame reads them

    @staticmethod
    def why_not(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
        if device.type != "cpu":
            return (f"runs on the CPU only, not on {device.type}",)
        if dtype != torch.float32:
            return (f"computes in float32 only, not in {dtype}",)
        own_reasons = [_unsupported(path, linear, device) for path, linear in linears(spec).items()]
        reasons = [*_unsupported_layers(spec), *_mixed_formats(spec), *own_reasons]
        return tuple(dict.fromkeys(reason for reason in reasons if reason is not None))

    @staticmethod
    def storage_format(format: Format) -> Format:
        """Dense weights are stored in the order of the kernels."""
        return FP32 if format.kind == "dense" else format

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend) -> Tensor:
        num_rows = len(tokens_T)
        out_TC = torch.empty((num_rows, self.body.spec.hidden_size))
        tokens_T, positions_T = tokens_T.contiguous(), positions_T.contiguous()
        addresses = (tokens_T.data_ptr(), positions_T.data_ptr())
        self.begin(num_rows, *addresses, end, out_TC.data_ptr())
        if isinstance(attend, NativeStep):
            self.run_whole(attend.owner, attend.plans)
        else:
            self._run_segments(attend, num_rows)
        return out_TC

    def begin(self, num_rows: int, tokens: int, positions: int, end: int, out: int) -> None:
        """Begin a step.

        `tokens` and `positions` are addresses of int64 arrays, with positions below `end`; `out` is
        the address of the final states, float32 [num_rows, C].
        """
        self._update_rope_tables(end)
        self.frame.begin(num_rows, tokens, positions, out)

    def run_whole(
        self, attention: NativeAttention, plans: tuple[_native.AttentionPlan, ...]
    ) -> None:
        """Compute the step that was begun, attention included."""
        threads = self.num_threads or torch.get_num_threads()
        segment = self._whole_segment(attention)
        if len(plans) == 1:
            segment.run_step(self.frame, plans[0], threads)
        else:
            segment.run_step(self.frame, plans, threads)

    def _whole_segment(self, attention: NativeAttention) -> _native.FusedSegment:
        """The step as one segment, built at the first step with this attention."""
        if self.whole is None or self.whole.attention is not attention:
            ops = tuple(op for stage in stages(self.body, attention) for op in stage)
            self.whole = _WholeStep(attention, ops, segment_of(*ops))
        return self.whole.segment

    def _run_segments(self, attend: Attend, num_rows: int) -> None:
        """Compute the step that was begun, calling `attend` between segments."""
        views = {shape: HeadViews(num_rows, *shape) for shape in dict.fromkeys(self.heads)}
        attended_THD: Tensor | None = None
        for layer, shape in enumerate(self.heads):
            view = views[shape]
            self._run(self.segments[layer], attended_THD, view.heads_TXD.data_ptr())
            sinks = self.sinks[layer]
            attended_THD = attend(view.q_THD, view.kv_T2KD, layer, *sinks).contiguous()
            assert attended_THD.shape == view.q_THD.shape and attended_THD.dtype == torch.float32
        self._run(self.segments[-1], attended_THD, 0)

    def _run(self, segment: _native.FusedSegment, attended_THD: Tensor | None, heads: int) -> None:
        attended = 0 if attended_THD is None else attended_THD.data_ptr()
        threads = self.num_threads or torch.get_num_threads()
        segment.run(self.frame, attended, heads, threads)

    def _update_rope_tables(self, end: int) -> None:
        tables = self.body.ropes.tables_up_to(end)
        if tables is self.tables:
            return
        self.rope_tables = tuple(map(padded_rope_table, tables))
        for rope, table_P2R in enumerate(self.rope_tables):
            num_positions, _, rotated = table_P2R.shape
            self.frame.set_rope(rope, table_P2R.data_ptr(), num_positions, rotated)
        self.tables = tables


@dataclass(frozen=True)
class _WholeStep:
    """A step as one segment; `ops` keeps the memory alive that it borrows."""

    attention: NativeAttention
    ops: tuple[Op, ...]
    segment: _native.FusedSegment


class HeadViews:
    """Buffers for q, k and v of one shape, which a segment writes."""

    def __init__(self, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.heads_TXD = torch.empty((num_rows, num_heads + 2 * num_kv_heads, head_dim))
        self.q_THD = self.heads_TXD[:, :num_heads]
        self.kv_T2KD = self.heads_TXD[:, num_heads:].view(-1, 2, num_kv_heads, head_dim)


def padded_rope_table(table_P2R: Tensor) -> Tensor:
    """The table of a rotary embedding; where nothing turns, one that turns two dimensions by 0."""
    if table_P2R.shape[-1]:
        return table_P2R
    identity_2R = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    return identity_2R.expand(len(table_P2R), 2, 2).contiguous()


def _unsupported(path: str, linear: LinearSpec, device: torch.device) -> str | None:
    """Why the linear at `path` cannot be part of a segment; None if it can."""
    kind = linear.format.kind
    if linear.format.ordered:
        return f"{path} gathers its inputs in act-order"
    if linear.format.wide:
        return f"{path} stores outlier inputs separately (LLM.int8)"
    if linear.format.threshold:
        return f"{path} looks for outlier inputs in every row (LLM.int8)"
    if path == "lm_head":
        return None
    if path.endswith("router"):
        plain = kind in ("dense", "bf16", "fp32")
        return None if plain else f"the router must have float32 weights, not {kind} ones"
    if kind not in _KINDS:
        return f"multiplies packed weights ({', '.join(_KINDS)}), not {kind}"
    if kind == "int8":
        from ridgeline.engine.quant.int8.choose import choose

        chosen = choose(device, linear.num_out, linear.num_in).name
        return None if chosen == "native" else f"int8 weights are multiplied by {chosen} here"
    return None


def _unsupported_layers(spec: ModelSpec) -> list[str]:
    """What the layers have that no operator of a segment computes."""
    unnormed = any(layer.norms == "after" and layer.mlp.num_experts for layer in spec.layers)
    checks = {
        "experts take rows that no norm has written": unnormed,
        "blocks are parallel": any(layer.parallel for layer in spec.layers),
        "norms subtract the mean": spec.norm_centred,
        "experts are chosen within groups": any(
            layer.mlp.routing.num_groups > 1 for layer in spec.layers
        ),
        "attention is latent": any(layer.attention.latent for layer in spec.layers),
        "layers are gated delta nets": has_states(spec),
        "experts weigh their inputs": any(layer.mlp.routing.weighs_inputs for layer in spec.layers),
        "attention has a gated output": any(layer.attention.gated for layer in spec.layers),
        "the activation is xIELU": any(layer.mlp.activation == "xielu" for layer in spec.layers),
    }
    found = [reason for reason, holds in checks.items() if holds]
    return [*found, *filter(None, [_scaled_queries(spec), why_torch_only(spec)])]


def _scaled_queries(spec: ModelSpec) -> str:
    ropes = [layer.attention.rope for layer in spec.layers]
    floors = [rope.query_floor - rope.query_offset for rope in ropes if rope.query_floor]
    if not floors:
        return ""
    first = min(floors)
    return f"queries are scaled from position {first:,} on (--max-model-len {first} avoids it)"


def _mixed_formats(spec: ModelSpec) -> list[str]:
    """Linears of one input can only be fused if they share a format."""
    for layer in spec.layers:
        attention, mlp = layer.attention, layer.mlp
        shared = () if mlp.shared is None else (mlp.shared.gate, mlp.shared.up)
        for group in ((attention.q, attention.k, attention.v), (mlp.gate, mlp.up), shared):
            if len({(linear.format, linear.bias) for linear in group}) > 1:
                return ["q, k, v (or gate and up) differ in format"]
    return []
