"""Layers as native segments: from one attention to the next in one parallel region.

What: between two attentions lie the output projection, two residual adds, two norms, the gated
feed-forward and the next layer's q, k, v with their rotation. A segment (native/layer/segment.h) runs all
of it in one call: rows are normalised, gated and quantised where they lie in cache, straight into
the form that the next product takes; threads claim pieces, and none waits for one that wakes late.

    embed·norm·qkv·turn ─attention─ o·add·norm·gate_up·gate·down·add·norm·qkv·turn ─attention─ …

Where attention is native too, it is an operator like the others and the step one segment: Python is
entered once per step and threads wake once. Any other attention is called between segments.

Invariant: bitwise the same row whatever it is batched with, on any number of threads, on every ISA
(the order of its sums stands in native/layer/segment.h; of products in native/linear/linear.h, which says where
tiles have another).

When it loses: nowhere that it runs; it needs the CPU, float32 arithmetic and weights that pack
(dense ones do: quant/fp32.py).

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
from ridgeline.modelspec.format import FP32, Format
from ridgeline.modelspec.model import LinearSpec, ModelSpec
from ridgeline.modelspec.rewrite import linears

_KINDS = ("int4", "int8", "blocks", "bf16", "fp32", "dense")


class NativeForward:
    """See the module's head. Keeps the frame in which its steps work: one step at a time."""

    def __init__(self, body: DecoderBody) -> None:
        self.body = body
        self.num_threads: int | None = None  # torch's, as it is when a step begins
        self.frame = _native.FusedFrame(isa())
        self.heads = tuple(heads_of(block.attention) for block in body.blocks)
        self.stages = stages(body)
        self.segments = tuple(segment_of(*ops) for ops in self.stages)
        self.whole: _Whole | None = None
        self.tables: tuple[Tensor, ...] = ()

    @staticmethod
    def why_not(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
        if device.type != "cpu":
            return (f"runs on the CPU only, not on {device.type}",)
        if dtype != torch.float32:
            return (f"computes in float32 only, not in {dtype}",)
        reasons = [_refusal(path, linear, device) for path, linear in linears(spec).items()]
        found = [*_joined(spec), *(reason for reason in reasons if reason is not None)]
        return tuple(dict.fromkeys(found))

    @staticmethod
    def storage_format(format: Format) -> Format:
        """Dense weights are put in the kernels' order."""
        return FP32 if format.kind == "dense" else format

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend) -> Tensor:
        num_rows = len(tokens_T)
        out_TC = torch.empty((num_rows, self.body.spec.hidden_size))
        tokens_T, positions_T = tokens_T.contiguous(), positions_T.contiguous()
        places = (tokens_T.data_ptr(), positions_T.data_ptr())
        self.begin(num_rows, *places, end, out_TC.data_ptr())
        if isinstance(attend, NativeStep):
            self.run_whole(attend.owner, attend.plan)
        else:
            self._between(attend, num_rows)
        return out_TC

    def begin(self, num_rows: int, tokens: int, positions: int, end: int, out: int) -> None:
        """A step of rows whose tokens and positions (int64, each < `end`) stand in memory;
        `out`: room for their last states [num_rows, C]."""
        self._turn_tables(end)
        self.frame.begin(num_rows, tokens, positions, out)

    def run_whole(self, attention: NativeAttention, plan: _native.AttentionPlan) -> None:
        """The begun step, attention included."""
        threads = self.num_threads or torch.get_num_threads()
        self._with(attention).run_step(self.frame, plan, threads)

    def _with(self, attention: NativeAttention) -> _native.FusedSegment:
        """The step as one segment; made at the first step with this attention."""
        if self.whole is None or self.whole.attention is not attention:
            ops = tuple(op for stage in stages(self.body, attention) for op in stage)
            self.whole = _Whole(attention, ops, segment_of(*ops))
        return self.whole.segment

    def _between(self, attend: Attend, num_rows: int) -> None:
        """The begun step, `attend` called between segments."""
        views = {shape: _Views(num_rows, *shape) for shape in dict.fromkeys(self.heads)}
        attended_THD: Tensor | None = None
        for layer, shape in enumerate(self.heads):
            view = views[shape]
            self._run(self.segments[layer], attended_THD, view.heads_TXD.data_ptr())
            attended_THD = attend(view.q_THD, view.kv_T2KD, layer).contiguous()
            assert attended_THD.shape == view.q_THD.shape and attended_THD.dtype == torch.float32
        self._run(self.segments[-1], attended_THD, 0)

    def _run(self, segment: _native.FusedSegment, attended_THD: Tensor | None, heads: int) -> None:
        attended = 0 if attended_THD is None else attended_THD.data_ptr()
        threads = self.num_threads or torch.get_num_threads()
        segment.run(self.frame, attended, heads, threads)

    def _turn_tables(self, end: int) -> None:
        tables = self.body.ropes.ready(end)
        if tables is self.tables:
            return
        for rope, table_P2R in enumerate(tables):
            num_positions, _, rotated = table_P2R.shape
            self.frame.set_rope(rope, table_P2R.data_ptr(), num_positions, rotated)
        self.tables = tables


@dataclass(frozen=True)
class _Whole:
    """A step as one segment; `ops` keep alive what it borrows."""

    attention: NativeAttention
    ops: tuple[Op, ...]
    segment: _native.FusedSegment


class _Views:
    """The step's heads of one shape, which a segment writes."""

    def __init__(self, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.heads_TXD = torch.empty((num_rows, num_heads + 2 * num_kv_heads, head_dim))
        self.q_THD = self.heads_TXD[:, :num_heads]
        self.kv_T2KD = self.heads_TXD[:, num_heads:].view(-1, 2, num_kv_heads, head_dim)


def _refusal(path: str, linear: LinearSpec, device: torch.device) -> str | None:
    """Why the linear at `path` cannot be part of a segment."""
    kind = linear.format.kind
    if linear.format.ordered:
        return f"{path} gathers its inputs in act-order"
    if linear.format.wide:
        return f"{path} keeps outlying inputs apart (LLM.int8)"
    if linear.format.threshold:
        return f"{path} looks for outlying inputs in every row (LLM.int8)"
    if path == "lm_head":
        return None
    if path.endswith(".router"):
        plain = kind in ("dense", "bf16", "fp32") and not linear.bias
        return None if plain else f"routes in float32, not by {kind} weights (or a bias)"
    if kind not in _KINDS:
        return f"multiplies packed weights ({', '.join(_KINDS)}), not {kind}"
    if kind == "int8":
        from ridgeline.engine.quant.int8.choose import choose

        chosen = choose(device, linear.num_out, linear.num_in).name
        return None if chosen == "native" else f"int8 weights are multiplied by {chosen} here"
    return None


def _joined(spec: ModelSpec) -> list[str]:
    """Products of one input whose formats differ are several products."""
    for layer in spec.layers:
        attention, mlp = layer.attention, layer.mlp
        for group in ((attention.q, attention.k, attention.v), (mlp.gate, mlp.up)):
            if len({(linear.format, linear.bias) for linear in group}) > 1:
                return ["q, k, v (or gate and up) differ in format"]
    return []
