"""Whole requests through `Engine` on this GPU: tokens per second, the host included.

    python benchmarks/gpu/engine.py [--model dummy:llama-3.1-8b] [--formats bf16,fp8,int8,int4]
        [--requests 1,32,128] [--input 512] [--output 128] [--speculation] [--json FILE]

Requests start at once and are greedy with random prompts; the first batch of each size, which
captures graphs, is not counted. `--speculation` decodes without drafts and with those of earlier
answers (suffix), at the depth that the engine chooses and at a fixed one. The batch that is not
counted then has the same prompts: a model of random weights continues no text that repeats itself,
but it gives the same answer again, so that drafts are made and nearly all accepted. That shows what
verifying them costs and gains, not what other texts would accept.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from ridgeline.engine.engine import Engine
from ridgeline.records import Sampling

SPECULATION: tuple[dict[str, Any] | None, ...] = (
    None,
    {"method": "suffix"},
    {"method": "suffix", "num_speculative_tokens": 4},
)


def prompts_of(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


def measure(engine: Engine, count: int, asked: argparse.Namespace) -> dict[str, Any]:
    """One line: `count` requests at once."""
    sampling = Sampling(temperature=0.0, max_tokens=asked.output, ignore_eos=True)
    vocab_size = engine.info.vocab_size
    first = 2 if asked.speculation else 1
    engine.generate(prompts_of(count, asked.input, vocab_size, first), sampling)
    before, began_s = engine.counters(), time.perf_counter()
    engine.generate(prompts_of(count, asked.input, vocab_size, 2), sampling)
    took_s = time.perf_counter() - began_s
    after = engine.counters()
    steps = after["num_steps"] - before["num_steps"]
    line = {
        "requests": count,
        "seconds": round(took_s, 3),
        "output_tok_s": round(count * asked.output / took_s, 1),
        "steps": steps,
        "ms_per_step": round(1e3 * took_s / steps, 3),
        "graph_replays": after.get("num_graph_replays", 0) - before.get("num_graph_replays", 0),
        "plan_s": round(after["step_plan_s"] - before["step_plan_s"], 3),
        "used_ahead": after.get("num_steps_used_ahead", 0) - before.get("num_steps_used_ahead", 0),
        "busy_s": round(after["step_busy_s"] - before["step_busy_s"], 3),
    }
    drafted, accepted = (
        after.get(f"spec_decode_num_{name}_tokens", 0)
        - before.get(f"spec_decode_num_{name}_tokens", 0)
        for name in ("draft", "accepted")
    )
    if drafted:
        line |= {"drafted": drafted, "accepted": accepted}
        line["acceptance"] = round(accepted / drafted, 3)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="dummy:llama-3.1-8b")
    parser.add_argument("--formats", default="bf16,fp8")
    parser.add_argument("--requests", default="1,32,128")
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--speculation", action="store_true")
    parser.add_argument("--async-scheduling", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    lines: list[dict[str, Any]] = []
    drafts = SPECULATION if asked.speculation else SPECULATION[:1]
    for format in ["bf16"] if asked.speculation else asked.formats.split(","):
        for speculation in drafts:
            engine = Engine.open(
                asked.model,
                device=asked.device,
                quantization=None if format == "bf16" else format,
                max_model_len=asked.input + asked.output + 16,
                max_num_seqs=max(map(int, asked.requests.split(","))),
                speculative_config=speculation,
                async_scheduling=asked.async_scheduling,
            )
            with engine:
                for count in map(int, asked.requests.split(",")):
                    line = {"format": format, "speculation": speculation}
                    lines.append(line | measure(engine, count, asked))
                    print(lines[-1], flush=True)
                    if asked.json is not None:
                        why = dict(engine.info.derivations)
                        record = {"torch": torch.__version__, "lines": lines, "why": why}
                        asked.json.write_text(json.dumps(record, indent=1))
            del engine
            gc.collect()
            if asked.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
