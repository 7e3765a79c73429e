"""Compiles an engine's kernels before its first request, on blocks that no sequence has.

Triton compiles a kernel when it is first called, for seconds; it keeps the result on disk
(TRITON_CACHE_DIR), so that later starts take a fraction. The kernels depend on the step: a
prompt, a later chunk, decoding rows, and how many of them.
"""

from __future__ import annotations

import time

import torch

from ridgeline.engine.attention.base import Attention
from ridgeline.engine.execution.batch import make_batch
from ridgeline.engine.execution.graphs.decode import DecodeGraphs
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.scheduler.plan import Run, SamplePoint
from ridgeline.records import Sampling

DECODE_ROWS = (1, 2, 16, 32, 64)
PROMPT = 32
_POINT = SamplePoint(Sampling(temperature=0.0, max_tokens=None), 0, 0, 1, is_argmax=True)


@torch.inference_mode()
def warm_up(
    decoder: Decoder,
    attention: Attention,
    graphs: DecodeGraphs,
    max_rows: int,
    padding_block: int,
) -> float:
    """Run one step of each kind, writing to `padding_block` alone; returns the seconds it took."""
    began_s = time.perf_counter()
    max_len = graphs.max_len
    blocks = (padding_block,) * max_len
    length = min(PROMPT, max_len // 2)
    tokens = (0,) * length
    prompt = Run(0, 0, tokens, blocks, None)
    chunk = Run(1, length, tokens, blocks, None)
    decode = Run(2, length, (0,), blocks, _POINT)
    for runs in ([prompt], [prompt, chunk, decode]):
        batch = make_batch(runs, decoder.device)
        attend = attention.prepare(runs)
        x_TC = decoder.hidden(batch.tokens_T, batch.positions_T, batch.end, attend)
        decoder.logits(x_TC[-1:])
    for count in DECODE_ROWS:
        if count <= max_rows:
            graphs.capture([decode] * count)
    if decoder.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began_s
