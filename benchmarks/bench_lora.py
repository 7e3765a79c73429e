"""What adapters cost: a decode step of one batch with 0, 1 and 4 LoRA adapters in it.

    python benchmarks/bench_lora.py [--model smollm2] [--sequences 8] [--rank 8] [--tokens 32]
        [--rounds 5]

One engine runs the native layers, another one (`--enable-lora`) the layers that adapters are added
to, with random adapters on every linear. Both have one thread, and the clock is the CPU time of the
process, so that a busy machine disturbs it less than wall time; rounds of all cases take turns.
Prints milliseconds per token and sequence, the median over the rounds and their range, and each
case's time against that of the native layers, paired by round; then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from ridgeline import Engine, Sampling
from ridgeline.engine.adapters.modules import modules_of
from ridgeline.hub.download import ensure_downloaded
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost.adapters import adapted_linears


def save_random(directory: Path, model: str, rank: int, seed: int) -> None:
    """An adapter on every linear of the model, as PEFT saves it."""
    spec, tensors = load_spec(model), {}
    generator = torch.Generator().manual_seed(seed)
    for path, module in modules_of(spec).items():
        linears = adapted_linears(spec.layers[module.layer])
        num_in = linears[module.keys[0]].num_in
        num_out = sum(linears[key].num_out for key in module.keys)
        stem = f"base_model.model.model.{path}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, num_in, generator=generator) * 0.01
        tensors[f"{stem}.lora_B.weight"] = torch.randn(num_out, rank, generator=generator) * 0.01
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def run(engine: Engine, args: argparse.Namespace, num_adapters: int) -> float:
    """CPU seconds for the batch, its sequences spread over the adapters."""
    sampling = Sampling(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    prompts = [[50 + i, 60, 70, 80] for i in range(args.sequences)]
    names = [f"a{i % num_adapters}" if num_adapters else "" for i in range(args.sequences)]
    begun = time.process_time()
    engine.generate(prompts, sampling, names)
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    for name, default in (("sequences", 8), ("rank", 8), ("tokens", 32), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    ensure_downloaded(args.model)
    cases = {"native layers": 0, "adapted, 0 adapters": 0, "1 adapter": 1, "4 adapters": 4}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        modules = []
        for i in range(4):
            save_random(Path(folder) / f"a{i}", args.model, args.rank, i)
            modules.append(f"a{i}={folder}/a{i}")
        size = {"kv_cache_memory_bytes": 128 << 20, "max_model_len": 512, "num_threads": 1}
        with (
            Engine.open(args.model, **size) as native,
            Engine.open(
                args.model, enable_lora=True, lora_modules=tuple(modules), **size
            ) as adapted,
        ):
            for round_ in range(args.rounds + 1):
                for name, num in cases.items():
                    took_s = run(native if name == "native layers" else adapted, args, num)
                    if round_:  # the first one warms up
                        seconds[name].append(took_s)
            nbytes = sum(own.nbytes for own in adapted.adapters)
    table, base = {}, seconds["native layers"]
    num_tokens = args.sequences * args.tokens
    for name, own in seconds.items():
        each = sorted(1e3 * took_s / num_tokens for took_s in own)
        times = [took_s / other for took_s, other in zip(own, base, strict=True)]
        table[name] = {
            "ms": [round(statistics.median(each), 2), round(each[0], 2), round(each[-1], 2)],
            "time": [round(statistics.median(times), 2), *(round(f(times), 2) for f in (min, max))],
        }
        print(f"{name:22} {table[name]['ms']} ms, {table[name]['time']} times the native")
    print(f"4 adapters of rank {args.rank}: {nbytes / 2**20:.1f} MiB")
    print(json.dumps({"sequences": args.sequences, "rank": args.rank, "cases": table}))


if __name__ == "__main__":
    main()
