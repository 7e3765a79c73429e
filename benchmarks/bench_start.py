"""What a packed checkpoint asks for: seconds from a bare process to the first token, and memory.

    python benchmarks/bench_start.py [--shape llama-1b-32k] [--quantization int4] [--rounds 5]
                                     [--keep DIR] [--json FILE]

Writes a packed checkpoint of random weights (kept with --keep, and then used again), opens it in a
fresh process per round, and prints medians of seconds from the start of the process: until torch is
imported, until all is, until the engine is open (`ready`), and until the first token; then the peak
of resident memory (VmHWM) after
`--sequences` answers against its bound: weights + KV cache, 15 % more, and 300 MB. The file is in
the page cache from the second round on; the first is reported separately. Modules are read as
bytecode, as in any installation: PYTHONDONTWRITEBYTECODE is not passed to the measured process,
because it would compile every Ridgeline module again (0.3 s).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SLACK, EXTRA_BYTES, READY_S = 1.15, 300e6, 2.0


def write_checkpoint(shape: str, quantization: str, directory: Path) -> None:
    """A packed checkpoint of random weights, layer by layer."""
    import torch

    from ridgeline.config.settings import settings_from
    from ridgeline.engine.checkpoints.sources import DummyWeights
    from ridgeline.engine.checkpoints.tensor_names import Part
    from ridgeline.engine.checkpoints.write_packed import write_packed
    from ridgeline.engine.config import resolve
    from ridgeline.modelspec.checkpoints.locate import model_path
    from ridgeline.modelspec.families.shapes import shape_config

    class Stored(DummyWeights):
        def get(self, part: Part) -> torch.Tensor:
            return super().get(part).to(torch.bfloat16)

    asked = {"model": f"dummy:{shape}", "quantization": quantization, "max_model_len": 256}
    spec = resolve(settings_from(asked)).spec
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        (source / "config.json").write_text(json.dumps(dict(shape_config(shape))))
        for file in model_path("demo").glob("tokenizer*"):
            shutil.copy(file, source / file.name)
        with torch.inference_mode():
            write_packed(source, spec, Stored(spec, 0), directory, {})


def child(directory: str, sequences: int, started: float) -> None:
    """In a separate process: open, answer, report."""
    import ridgeline.engine.import_torch  # noqa: F401  # as the engine does first

    torch_done = time.time()
    from ridgeline.engine.engine import Engine
    from ridgeline.records import Sampling

    imported = time.time()
    engine = Engine.open(
        directory, max_model_len=1024, kv_cache_memory_bytes=256 << 20, max_num_seqs=sequences
    )
    ready = time.time()
    with engine:
        engine.generate([[1, 2, 3]], Sampling(max_tokens=1, ignore_eos=True))
        first = time.time()
        prompts = [[i + 1] * 128 for i in range(sequences)]
        engine.generate(prompts, Sampling(max_tokens=32, ignore_eos=True))
        figures = {
            "torch_s": torch_done - started,
            "import_s": imported - started,
            "ready_s": ready - started,
            "first_token_s": first - started,
            "peak_bytes": peak_bytes(),
            "weight_bytes": engine.info.weight_bytes,
            "kv_bytes": engine.resolved.kv_cache_memory_bytes,
        }
    print(json.dumps(figures))


def peak_bytes() -> int:
    """The largest resident size that this process has had."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(directory: Path, sequences: int) -> dict[str, float]:
    """One fresh process."""
    asked = [sys.executable, __file__, "--child", str(directory), "--sequences", str(sequences)]
    world = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    begun = time.time()
    done = subprocess.run(
        [*asked, "--started", repr(begun)], check=True, capture_output=True, text=True, env=world
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Medians, and the memory against its bound."""
    middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    bound = SLACK * (middle["weight_bytes"] + middle["kv_bytes"]) + EXTRA_BYTES
    return middle | {"bound_bytes": bound, "first_round_ready_s": rounds[0]["ready_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-1b-32k")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.sequences, args.started)
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = args.keep or Path(folder) / "packed"
        if not directory.exists():
            write_checkpoint(args.shape, args.quantization, directory)
        found = summary([measure(directory, args.sequences) for _ in range(args.rounds)])
    for key, value in found.items():
        print(f"{key:20} {value / 1e6:10.1f} MB" if "bytes" in key else f"{key:20} {value:10.2f} s")
    print(f"ready within {READY_S:g} s: {found['ready_s'] < READY_S}; ", end="")
    print(f"memory within its bound: {found['peak_bytes'] <= found['bound_bytes']}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
