"""Decode and prefill steps of an engine on this GPU, in several weight formats and modes.

    python benchmarks/gpu/steps.py [--model dummy:llama-3.1-8b] [--formats bf16,fp8,int8,int4]
        [--sequences 1,32,128] [--context 512] [--prompt 2048] [--chunks 64,256]
        [--modes graphs,eager]
        [--layer-backend auto] [--attention-backend auto] [--json FILE]

A step goes through the runner as in the engine, from the plan on the host to the tokens on the
host; `device_ms` is the graph alone, by the device's events. Figures are medians. Bytes are the
compulsory ones: each weight once, the keys and values of every context once. `of_bandwidth` is
their share of the card's data-sheet bandwidth, `of_copy` that of a copy measured in this process;
`mfu` is the share of the data sheet's dense BF16 peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ridgeline.config.settings import settings_from
from ridgeline.engine.build import EngineParts, assemble
from ridgeline.engine.config import ResolvedSettings, resolve
from ridgeline.engine.kernels.pointwise import COMPILE_CLOCK
from ridgeline.engine.scheduler.plan import Run, SamplePoint, StepPlan
from ridgeline.modelspec.cost import decode_work, prefill_work
from ridgeline.records import Sampling

CARDS = {"H100": (3.35e12, 989e12), "H200": (4.8e12, 989e12)}
"""Data-sheet bandwidth in bytes/s and dense BF16 FLOP/s of the SXM cards."""
GREEDY = Sampling(temperature=0.0, max_tokens=None, ignore_eos=True)
POINT = SamplePoint(GREEDY, 0, 0, 1, is_argmax=True)


def card() -> tuple[float, float]:
    """Data-sheet peaks of this card; ones that mean nothing without a card."""
    if not torch.cuda.is_available():
        return 1e11, 1e12
    name = torch.cuda.get_device_name()
    return next(peaks for key, peaks in CARDS.items() if key in name)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 2 GiB within the card."""
    if not torch.cuda.is_available():
        return 1e11
    source = torch.randn(1 << 30, device="cuda").bfloat16()
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_seconds(lambda: target.copy_(source))


def device_seconds(work: Callable[[], object], times: int = 20) -> float:
    """Median seconds by the device's events."""
    work()
    taken = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1000)
    return statistics.median(taken)


def wall_seconds(work: Callable[[int], object], times: int) -> float:
    """Median seconds by the host's clock; `work` waits for its result."""
    for step in range(3):
        work(step)
    taken = []
    for step in range(times):
        began_s = time.perf_counter()
        work(3 + step)
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


def open_parts(asked: argparse.Namespace, format: str) -> tuple[ResolvedSettings, EngineParts]:
    """An engine's parts with one weight format, its cache filled with random numbers."""
    settings = settings_from(
        {
            "model": asked.model,
            "device": asked.device,
            "quantization": None if format == "bf16" else format,
            "max_model_len": max(asked.context + 256, asked.prompt + 16),
            "max_num_seqs": max(asked.sequences),
            "max_num_batched_tokens": max(4096, asked.prompt),
            "layer_backend": asked.layer_backend,
            "attention_backend": asked.attention_backend,
        }
    )
    resolved = resolve(settings)
    parts = assemble(resolved)
    for layer in parts.runner.cache.layers:
        if layer.dtype.is_floating_point:
            layer.normal_()
    return resolved, parts


def decode_runs(resolved: ResolvedSettings, count: int, position: int) -> tuple[Run, ...]:
    """`count` sequences at one position, each with its own blocks."""
    width = -(-(position + 1) // resolved.block_size)
    stride = resolved.num_blocks // count
    return tuple(
        Run(i, position, (17 + i,), tuple(range(i * stride, i * stride + width)), POINT)
        for i in range(count)
    )


def time_decode(
    resolved: ResolvedSettings, parts: EngineParts, count: int, asked: argparse.Namespace, mode: str
) -> dict[str, object]:
    """One line: a decode step of `count` sequences.

    Mode "graphs": from one graph, or where the layers allow none from pieces; "eager": without.
    """
    runner, context = parts.runner, asked.context
    graphs, pieces = runner.graphs, runner.pieces
    if mode == "eager":
        runner.graphs, runner.pieces = None, None
        runner.greedy = _no_greedy() if graphs is not None else runner.greedy
    else:
        mode = "graphs" if graphs is not None else "pieces" if pieces is not None else "eager"
    try:
        plans = [
            StepPlan(i, decode_runs(resolved, count, context + i)) for i in range(asked.steps + 3)
        ]
        wall_s = wall_seconds(lambda step: runner.run(plans[step]), asked.steps)
        device_s = None
        if graphs is not None and mode == "graphs":
            device_s = device_seconds(lambda: graphs.replay_last(plans[-1].runs))
    finally:
        runner.pieces = pieces
        if graphs is not None:
            runner.use_graphs(graphs)
    num_bytes = decode_work(resolved.spec, count, context).bytes
    bytes_s, _ = card()
    line: dict[str, object] = {
        "phase": "decode",
        "sequences": count,
        "context": context,
        "mode": mode,
        "wall_ms": round(1e3 * wall_s, 3),
        "device_ms": None if device_s is None else round(1e3 * device_s, 3),
        "tok_s": round(count / wall_s, 1),
        "bytes": int(num_bytes),
        "of_bandwidth": round(num_bytes / wall_s / bytes_s, 3),
        "of_copy": round(num_bytes / wall_s / asked.copy_bytes_s, 3),
    }
    if device_s is not None:
        line["device_of_bandwidth"] = round(num_bytes / device_s / bytes_s, 3)
    return line


def _no_greedy() -> object:
    from ridgeline.engine.execution.greedy_fast_path import NoGreedyPath

    return NoGreedyPath()


def time_prefill(
    resolved: ResolvedSettings, parts: EngineParts, asked: argparse.Namespace
) -> dict[str, object]:
    """One line: a prompt from its start, to its first token."""
    tokens = tuple(int(t) for t in torch.randint(3, resolved.spec.vocab_size, (asked.prompt,)))
    blocks = tuple(range(-(-asked.prompt // resolved.block_size)))
    plan = StepPlan(0, (Run(0, 0, tokens, blocks, POINT),))
    wall_s = wall_seconds(lambda _: parts.runner.run(plan), 8)
    flops = prefill_work(resolved.spec, asked.prompt).flops
    return {
        "phase": "prefill",
        "tokens": asked.prompt,
        "wall_ms": round(1e3 * wall_s, 3),
        "tok_s": round(asked.prompt / wall_s, 1),
        "flops": float(flops),
        "mfu": round(flops / wall_s / card()[1], 3),
    }


def time_mixed(
    resolved: ResolvedSettings, parts: EngineParts, asked: argparse.Namespace, chunk: int, mode: str
) -> dict[str, object]:
    """One line: a chunk of a prompt and a decoding row of every other sequence, in one step.

    Mode "graphs": from graphs between the attention calls; "eager": without.
    """
    runner, pieces = parts.runner, parts.runner.pieces
    if mode == "eager":
        runner.pieces = None
    rows = max(asked.sequences)
    decoding = decode_runs(resolved, rows + 1, asked.context)[1:]
    tokens = tuple(int(t) for t in torch.randint(3, resolved.spec.vocab_size, (chunk,)))
    blocks = tuple(range(-(-2 * chunk // resolved.block_size)))
    plan = StepPlan(0, (Run(0, chunk, tokens, blocks, None), *decoding))
    try:
        wall_s = wall_seconds(lambda _: runner.run(plan), asked.steps)
    finally:
        runner.pieces = pieces
    return {
        "phase": "mixed",
        "tokens": chunk,
        "sequences": rows,
        "context": asked.context,
        "mode": mode if pieces is not None else "eager",
        "wall_ms": round(1e3 * wall_s, 3),
        "tok_s": round((chunk + rows) / wall_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="dummy:llama-3.1-8b")
    parser.add_argument("--device", default="cuda", help="cpu: only to try the script")
    parser.add_argument("--formats", default="bf16,fp8,int8,int4")
    parser.add_argument("--sequences", default="1,32,128")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--chunks", default="", help="of a prompt, in a step with decoding rows")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--modes", default="graphs,eager", help="eager: of the first format")
    parser.add_argument("--layer-backend", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    asked.sequences = [int(count) for count in asked.sequences.split(",")]
    asked.copy_bytes_s = copy_bandwidth()
    record: dict[str, object] = {
        "gpu": torch.cuda.get_device_name() if asked.device == "cuda" else "none",
        "torch": torch.__version__,
        "model": asked.model,
        "copy_bytes_s": asked.copy_bytes_s,
    }
    lines: list[dict[str, object]] = []
    for format in asked.formats.split(","):
        began_s = time.perf_counter()
        resolved, parts = open_parts(asked, format)
        load_s = time.perf_counter() - began_s
        base = {
            "format": format,
            "load_s": round(load_s, 2),
            "layers": resolved.layer_backend,
            "attention": resolved.attention_backend,
        }
        print(base, flush=True)
        works: list[Callable[[], dict[str, object]]] = [
            lambda r=resolved, p=parts, c=count, m=mode: time_decode(r, p, c, asked, m)
            for mode in asked.modes.split(",")
            if mode == "graphs" or format == asked.formats.split(",")[0]
            for count in asked.sequences
        ]
        works.append(lambda r=resolved, p=parts: time_prefill(r, p, asked))
        works += [
            lambda r=resolved, p=parts, c=chunk, m=mode: time_mixed(r, p, asked, c, m)
            for chunk in map(int, filter(None, asked.chunks.split(",")))
            for mode in ("graphs", "eager")
        ]
        for work in works:
            try:
                line = base | work()
            except Exception as error:
                line = base | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            lines.append(line)
            print({k: v for k, v in line.items() if k not in base}, flush=True)
            record |= {"compile_s": COMPILE_CLOCK.seconds, "lines": lines}
            if asked.json is not None:
                asked.json.write_text(json.dumps(record, indent=1))
        graphs = parts.runner.graphs
        if graphs is not None:
            record[f"graphs {format}"] = graphs.counts.by_bucket
        if parts.runner.pieces is not None:
            record[f"pieces {format}"] = parts.runner.pieces.counts.as_dict()
        if asked.json is not None:
            asked.json.write_text(json.dumps(record, indent=1))
        del parts, resolved, works, graphs
        gc.collect()
        if asked.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
