"""Triton kernels on this GPU, each against its bound and against torch's own operator.

    python benchmarks/gpu/bench_triton.py [--only decode,prefill,linear,rows] [--tiles]
        [--seconds 240] [--json FILE]

Shapes are those of llama-3.1-8b. A time is that of one launch within a CUDA graph of many, over
rotating buffers that exceed the L2 cache. Bounds: compulsory bytes over the bandwidth of a copy
measured in this process, or FLOPs over the dense peak of the card's data sheet. `--tiles` also
times other tile shapes than the chosen ones. A kernel that fails is reported as failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.kernels.triton import linear, norm, sampling
from ridgeline.engine.kernels.triton.attention import paged_decode, paged_prefill
from ridgeline.engine.kernels.triton.rope_store import rope_store
from ridgeline.engine.kernels.triton.tiles import AttentionTile

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
DENSE_BF16_PEAK = 989e12  # H100 and H200 SXM
BEYOND_CACHE = 256 << 20
LAUNCHES = 24
Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One kernel on one shape: work per rotating buffer, its compulsory cost, and torch's own."""

    kernel: str
    shape: str
    works: Sequence[Work]
    num_bytes: float = 0
    flops: float = 0
    torch_works: Sequence[Work] = ()
    variant: str = "chosen"


@dataclass(frozen=True)
class Line:
    """A measured case. `of_bound` is the share of the bound that was reached."""

    kernel: str
    shape: str
    variant: str
    microseconds: float | None = None
    bound_microseconds: float | None = None
    of_bound: float | None = None
    torch_microseconds: float | None = None
    error: str | None = None


def graph_seconds(works: Sequence[Work]) -> float:
    """Seconds of one launch, from a graph that runs the works in turn."""
    for work in works:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    num_rounds = max(1, LAUNCHES // len(works))
    with torch.cuda.graph(graph):
        for _ in range(num_rounds):
            for work in works:
                work()
    graph.replay()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times) / (num_rounds * len(works))


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 2 GiB."""
    source = torch.zeros(1 << 30, dtype=BF16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_seconds([lambda: target.copy_(source)])


def num_copies(num_bytes: int) -> int:
    return max(1, min(16, -(-BEYOND_CACHE // num_bytes)))


def random_cache(num_blocks: int, dtype: torch.dtype) -> Tensor:
    """kv_N2KBW: with scales where it is int8."""
    width = HEAD_DIM + 4 * (dtype == INT8)
    shape = (num_blocks, 2, KV_HEADS, BLOCK, width)
    if dtype == INT8:
        return torch.zeros(shape, dtype=dtype, device="cuda")  # scales that are finite
    return torch.randn(shape, dtype=BF16, device="cuda").to(dtype)


def decode_cases(tiles: bool) -> Iterator[Case]:
    for dtype in (BF16, FP8, INT8):
        for num_seqs, context in ((1, 2048), (1, 16384), (32, 2048), (128, 1024), (8, 8192)):
            if dtype == BF16 or num_seqs == 32:
                yield decode_case(dtype, num_seqs, context)
    if tiles:
        for keys, stages, splits in ((32, 4, None), (64, 2, None), (128, 2, None), (64, 3, 4)):
            tile = AttentionTile(16, keys, 4, stages)
            yield decode_case(BF16, 32, 2048, tile, splits)
        for keys, stages in ((64, 3), (64, 4)):
            yield decode_case(FP8, 32, 2048, AttentionTile(16, keys, 4, stages))
            yield decode_case(INT8, 32, 2048, AttentionTile(16, keys, 4, stages))


def decode_case(
    dtype: torch.dtype,
    num_seqs: int,
    context: int,
    tile: AttentionTile | None = None,
    splits: int | None = None,
) -> Case:
    per_seq = context // BLOCK
    caches = [random_cache(num_seqs * per_seq, dtype)]
    caches += [caches[0].clone() for _ in range(num_copies(caches[0].nbytes) - 1)]
    tables = torch.randperm(num_seqs * per_seq, device="cuda").view(num_seqs, per_seq).int()
    lens = torch.full((num_seqs,), context, dtype=torch.int32, device="cuda")
    q = torch.randn(num_seqs, HEADS, HEAD_DIM, dtype=BF16, device="cuda")

    def work(kv: Tensor) -> Work:
        return lambda: paged_decode(
            *(q, kv, tables, lens), scale=0.088, max_context=context, tile=tile, splits=splits
        )

    torch_works = []
    if dtype == BF16 and tile is None:
        shape = (num_seqs, KV_HEADS, context, HEAD_DIM)
        for kv in caches:
            k, v = kv.view(2, *shape)
            torch_works.append(sdpa(q.unsqueeze(2), k, v))
    return Case(
        "paged_decode",
        f"{dtype} B={num_seqs} context={context}",
        [work(kv) for kv in caches],
        num_bytes=caches[0].nbytes,
        torch_works=torch_works,
        variant="chosen" if tile is None else f"{tile} splits={splits}",
    )


def sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Work:
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def prefill_cases(tiles: bool) -> Iterator[Case]:
    chosen: list[AttentionTile | None] = [None]
    others = [
        AttentionTile(128, 128, 8, 2),
        AttentionTile(128, 64, 4, 3),
        AttentionTile(64, 64, 4, 3),
    ]
    for tile in chosen + (others if tiles else []):
        yield prefill_case(1, 2048, tile)
        if tile is None:
            yield prefill_case(4, 2048, tile)
            yield prefill_case(1, 8192, tile)


def prefill_case(num_seqs: int, length: int, tile: AttentionTile | None) -> Case:
    per_seq = length // BLOCK
    kv = random_cache(num_seqs * per_seq, BF16)
    tables = torch.randperm(num_seqs * per_seq, device="cuda").view(num_seqs, per_seq).int()
    lens = torch.full((num_seqs,), length, dtype=torch.int32, device="cuda")
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * length
    q = torch.randn(num_seqs * length, HEADS, HEAD_DIM, dtype=BF16, device="cuda")
    k, v = kv.view(2, num_seqs, KV_HEADS, length, HEAD_DIM)
    dense_q = q.view(num_seqs, length, HEADS, HEAD_DIM).transpose(1, 2)
    return Case(
        "paged_prefill",
        f"{num_seqs} x {length}",
        [
            lambda: paged_prefill(
                *(q, kv, tables, starts, lens), scale=0.088, max_queries=length, tile=tile
            )
        ],
        flops=num_seqs * 2.0 * length * length * HEADS * HEAD_DIM,
        torch_works=[sdpa(dense_q, k, v, is_causal=True)] if tile is None else [],
        variant="chosen" if tile is None else str(tile),
    )


def linear_cases(tiles: bool) -> Iterator[Case]:
    for num_out, num_in in ((4096, 4096), (28672, 4096), (4096, 14336)):
        for rows in (1, 32):
            for kind in ("bf16", "int8", "fp8", "int8-int8", "fp8-fp8", "int4"):
                yield linear_case(kind, rows, num_out, num_in)
    if tiles:
        for splits, stages in ((4, 5), (8, 4), (16, 3), (8, 7)):
            tile = linear.SkinnyTile(16, 128, splits, 4, stages)
            yield linear_case("int4", 1, 4096, 4096, tile)
            yield linear_case("bf16", 1, 4096, 4096, tile)


def linear_case(
    kind: str, rows: int, num_out: int, num_in: int, tile: linear.SkinnyTile | None = None
) -> Case:
    x = torch.randn(rows, num_in, dtype=BF16, device="cuda")
    weight = torch.randn(num_out, num_in, dtype=BF16, device="cuda") * 0.02
    scale = torch.full((num_out,), 0.01, device="cuda")
    dtype = {"int8": INT8, "fp8": FP8}.get(kind.split("-")[0], BF16)
    nibbles = torch.randint(16, (num_out, num_in), dtype=torch.uint8, device="cuda")
    stored = linear.pack_int4(nibbles) if kind == "int4" else weight.to(dtype)
    weights = [stored] + [stored.clone() for _ in range(num_copies(stored.nbytes) - 1)]
    scale_OG = torch.full((num_out, num_in // 128), 0.01, dtype=torch.float16, device="cuda")
    codes, scale_T1 = norm.quantise_rows(x, "int8" if dtype == INT8 else "fp8")

    def work(w: Tensor) -> Work:
        if kind == "bf16":
            return lambda: linear.w16a16(x, w, tile=tile)
        if kind == "int4":
            return lambda: linear.w4a16(x, w, scale_OG, None, group_size=128, tile=tile)
        if "-" in kind:
            return lambda: linear.w8a8(codes, scale_T1, w, scale, out_dtype=BF16, tile=tile)
        return lambda: linear.w8a16(x, w, scale, tile=tile)

    def torch_work(w: Tensor) -> Work | None:
        if kind == "bf16":
            return lambda: F.linear(x, w)
        if kind == "fp8-fp8":
            scales = {"scale_a": scale_T1, "scale_b": scale.unsqueeze(0)}
            return lambda: torch._scaled_mm(codes, w.t(), out_dtype=BF16, **scales)
        if kind == "int8-int8":
            padded = F.pad(codes, (0, 0, 0, max(0, 32 - rows)))
            return lambda: torch._int_mm(padded, w.t())
        return None

    num_bytes = stored.nbytes + (scale_OG.nbytes if kind == "int4" else 0)
    torch_works = [own for w in weights if (own := torch_work(w)) and tile is None]
    shape = f"{kind} T={rows} {num_out}x{num_in}"
    variant = "chosen" if tile is None else str(tile)
    works = [work(w) for w in weights]
    return Case("linear", shape, works, num_bytes, 0, torch_works, variant)


def row_cases(tiles: bool) -> Iterator[Case]:
    for rows in (1, 32, 2048):
        x, y = (torch.randn(rows, 4096, dtype=BF16, device="cuda") for _ in range(2))
        gain, gate_up = x[0].clone(), torch.randn(rows, 28672, dtype=BF16, device="cuda")
        shape = f"T={rows}"
        unfused = [lambda x=x, y=y, gain=gain: F.rms_norm(x + y, (4096,), gain, 1e-5)]
        works: list[Work] = [lambda x=x, y=y, gain=gain: norm.add_rms_norm(x, y, gain, 1e-5)]
        yield Case("add_rms_norm", shape, works, 4 * x.nbytes, 0, unfused)
        works = [lambda x=x, y=y, gain=gain: norm.add_rms_norm_q(x, y, gain, 1e-5, "fp8")]
        yield Case("add_rms_norm_q", shape, works, 3.5 * x.nbytes)
        works = [lambda g=gate_up: norm.silu_mul(g)]
        unfused = [lambda g=gate_up: F.silu(g[:, :14336]) * g[:, 14336:]]
        yield Case("silu_mul", shape, works, 1.5 * gate_up.nbytes, 0, unfused)
        yield rope_case(rows)
    for rows in (1, 32, 128):
        logits = torch.randn(rows, 128256, dtype=BF16, device="cuda")
        works = [lambda x=logits: sampling.first_largest(x)]
        unfused = [lambda x=logits: x.argmax(1)]
        yield Case("first_largest", f"S={rows}", works, logits.nbytes, 0, unfused)


def rope_case(rows: int) -> Case:
    num_all = HEADS + 2 * KV_HEADS
    qkv = torch.randn(rows, num_all, HEAD_DIM, dtype=BF16, device="cuda")
    table = torch.randn(rows, HEAD_DIM, device="cuda")
    kv, slots = random_cache(rows, BF16), torch.arange(rows, device="cuda") * BLOCK
    work: Work = lambda: rope_store(  # noqa: E731
        *(qkv, table, table, kv, slots), num_heads=HEADS, num_kv_heads=KV_HEADS
    )
    moved = (2 * (HEADS + KV_HEADS) + 3 * KV_HEADS) * HEAD_DIM * 2 * rows + 2 * table.nbytes
    return Case("rope_store", f"T={rows}", [work], moved)


def measure(case: Case, bandwidth: float) -> Line:
    bound = max(case.num_bytes / bandwidth, case.flops / DENSE_BF16_PEAK)
    try:
        seconds = graph_seconds(case.works)
        torch_seconds = graph_seconds(case.torch_works) if case.torch_works else None
    except Exception as error:  # the other kernels are measured all the same
        torch.cuda.synchronize()
        text = f"{type(error).__name__}: {error}"[:300]
        return Line(case.kernel, case.shape, case.variant, error=text)
    return Line(
        case.kernel,
        case.shape,
        case.variant,
        round(seconds * 1e6, 2),
        round(bound * 1e6, 2),
        round(bound / seconds, 3),
        None if torch_seconds is None else round(torch_seconds * 1e6, 2),
    )


CASES = {
    "decode": decode_cases,
    "prefill": prefill_cases,
    "linear": linear_cases,
    "rows": row_cases,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--seconds", type=float, default=240.0, help="stop after this time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    begun, lines = time.monotonic(), []
    bandwidth = copy_bandwidth()
    head = {"device": torch.cuda.get_device_name(), "copy_gb_s": round(bandwidth / 1e9, 1)}
    print(json.dumps(head), flush=True)
    for name in arguments.only.split(","):
        for case in CASES[name](arguments.tiles):
            if time.monotonic() - begun > arguments.seconds:
                break
            line = measure(case, bandwidth)
            lines.append({key: value for key, value in asdict(line).items() if value is not None})
            print(json.dumps(lines[-1]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(head | {"lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
