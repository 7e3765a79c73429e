"""Routed experts: native grouped products against the same experts one after another.

    python benchmarks/bench_moe.py [--model dummy:qwen3-30b-a3b] [--quantization int4]
        [--rows 1,4,16,64] [--rounds 7] [--json FILE]

One layer of the shape with random weights. Attention is left out (it gives its queries back), so
that both backends differ in nothing but the code around it. Backends take turns; medians. "read" is
the weights of the experts that the step's tokens chose, and the share of the layer that this is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

import torch
from msgspec.structs import replace
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.layers import layer_backend_of
from ridgeline.engine.model.base import LayerForward
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.model.moe import MoeMlp
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.rewrite import apply_lm_head, apply_quantization

BACKENDS = ("native", "torch")


def queries(q_THD: Tensor, kv_T2KD: Tensor, layer: int) -> Tensor:
    """An attention that costs nothing."""
    return q_THD


def one_layer(model: str, quantization: str) -> Decoder:
    """The first routed layer of the shape, with a small vocabulary."""
    spec = load_spec(model)
    routed = next(layer for layer in spec.layers if layer.mlp.router is not None)
    head = replace(spec.lm_head, num_out=1000)
    small = replace(spec, layers=(routed,), vocab_size=1000, lm_head=head)
    packed = apply_lm_head(apply_quantization(small, quantization), quantization)
    return load_decoder(model, packed, device="cpu", compute_dtype=torch.float32)


def share_read(decoder: Decoder, x_TC: Tensor) -> float:
    """Share of the experts that these rows choose."""
    mlp = decoder.blocks[0].mlp
    assert isinstance(mlp, MoeMlp)
    return len(mlp.route(x_TC)[1].unique()) / len(mlp.experts)


def seconds(forward: LayerForward, tokens_T: Tensor, positions_T: Tensor) -> float:
    begun = time.perf_counter()
    forward(tokens_T, positions_T, len(tokens_T) + 1, queries)
    return time.perf_counter() - begun


def measure(decoder: Decoder, num_rows: int, rounds: int) -> dict[str, Any]:
    """Medians of both backends for `num_rows` rows; fresh tokens every round."""
    forwards = {name: layer_backend_of(name)(decoder.body) for name in BACKENDS}
    spent: dict[str, list[float]] = {name: [] for name in forwards}
    shares, positions_T = [], torch.arange(num_rows)
    for i in range(rounds + 1):
        tokens_T = torch.randint(0, 1000, (num_rows,))
        for name, forward in forwards.items():
            taken = seconds(forward, tokens_T, positions_T)
            spent[name] += [taken] if i else []
        x_TC = decoder.blocks[0].mlp_norm(decoder.table.rows(tokens_T).float())
        shares.append(share_read(decoder, x_TC))
    mlp = decoder.spec.layers[0].mlp
    experts = sum(each.nbytes for each in (mlp.gate, mlp.up, mlp.down)) * mlp.num_experts
    ms = {f"{name}_ms": statistics.median(times) * 1e3 for name, times in spent.items()}
    share = statistics.median(shares)
    return {"rows": num_rows, **ms, "share_read": share, "expert_bytes": share * experts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="dummy:qwen3-30b-a3b")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    with torch.inference_mode():
        decoder = one_layer(asked.model, asked.quantization)
        found = [measure(decoder, int(rows), asked.rounds) for rows in asked.rows.split(",")]
    threads = torch.get_num_threads()
    read = statistics.median(r for r, _ in _native.read_rates(256 << 20, threads, 5, 0.1))
    print(f"one layer of {asked.model}, {asked.quantization}, {threads} threads")
    for row in found:
        bound_ms, ratio = row["expert_bytes"] / read * 1e3, row["torch_ms"] / row["native_ms"]
        print(
            f"  {row['rows']:4} rows: native {row['native_ms']:8.3f} ms, torch"
            f" {row['torch_ms']:8.3f} ms, {ratio:.2f} x; read {row['expert_bytes'] * 1e-6:.1f} MB"
            f" of experts ({row['share_read']:.0%}), {bound_ms:.3f} ms at the read rate"
        )
    print(json.dumps(found))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
