"""One model over two processes against one process with as many threads, interleaved.

    python benchmarks/bench_parallel.py [--model MODEL] [--rounds N] [--threads N]

Every arm has `--threads` threads in all: one process with all of them, or two with half each, as
tensor parallelism (with and without sequence parallelism), as stages or with the context divided.
Prints, per arm, the median milliseconds of a decode step of one and of four sequences and of a
prompt, each as a ratio to one process; and, on a text, how far the log-probabilities are from those
of one process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack

import numpy as np

from ridgeline.engine.engine import Engine
from ridgeline.records import Sampling

ARMS = {
    "one process": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp2 sp": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}
TEXT = "The history of the bridge begins in the year when the river was first crossed by a road. "
NUM_DECODED, PROMPT_REPEATS = 16, 44  # tokens of more than one chunk of 512


def decode_ms(engine: Engine, num_sequences: int, number: int) -> float:
    """Milliseconds of a decode step of several sequences."""
    prompts = [f"{number} {i} {TEXT}" for i in range(num_sequences)]
    times = []
    for length in (1, 1, NUM_DECODED + 1):  # the first fills the prefix cache
        began_s = time.perf_counter()
        engine.generate(prompts, Sampling(temperature=0.0, max_tokens=length, ignore_eos=True))
        times.append(time.perf_counter() - began_s)
    return (times[2] - times[1]) / NUM_DECODED * 1000


def prompt_ms(engine: Engine, number: int) -> float:
    """Milliseconds of a prompt that is in no cache."""
    began_s = time.perf_counter()
    engine.generate([f"{number} {TEXT * PROMPT_REPEATS}"], Sampling(temperature=0.0, max_tokens=1))
    return (time.perf_counter() - began_s) * 1000


def measure(engine: Engine, number: int) -> tuple[float, float, float]:
    """A decode step of one sequence and of four, and a prompt."""
    return decode_ms(engine, 1, number), decode_ms(engine, 4, number), prompt_ms(engine, number)


def compare(engine: Engine, one: Engine) -> str:
    """Divergence from one process, and how often both prefer the same token."""
    tokens = one.tokenizer.encode(TEXT * 3)
    p_TV, q_TV = one.logprobs_of(tokens), engine.logprobs_of(tokens)
    kl = float(np.mean((np.exp(p_TV) * (p_TV - q_TV)).sum(1)))
    agreement = float(np.mean(p_TV.argmax(1) == q_TV.argmax(1)))
    largest = float(np.abs(p_TV - q_TV).max())
    return f"KL {kl:.1e}, same token {agreement:.1%}, largest difference {largest:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    asked = parser.parse_args()
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                Engine.open(
                    asked.model,
                    device=asked.device,
                    max_model_len=2048,
                    max_num_seqs=4,
                    kv_cache_memory_bytes=320 << 20,
                    num_threads=asked.threads if not arm else max(1, asked.threads // 2),
                    **arm,
                )
            )
            for name, arm in ARMS.items()
            if name in asked.arms or not arm
            if asked.device == "cpu" or "context_parallel_size" not in arm
        }
        print(f"{asked.model}, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
        for number in range(asked.rounds):
            for name, engine in engines.items():
                times[name].append(measure(engine, number))
        medians = {
            name: [statistics.median(column) for column in zip(*rows, strict=True)]
            for name, rows in times.items()
        }
        for name, row in medians.items():
            shown = [
                f"{ms:8.1f} ms ({ms / base:4.2f} x)"
                for ms, base in zip(row, medians["one process"], strict=True)
            ]
            print(f"{name:12} decode 1{shown[0]}  decode 4{shown[1]}  prompt{shown[2]}")
        for name, engine in engines.items():
            print(f"{name:12} {compare(engine, engines['one process'])}")


if __name__ == "__main__":
    main()
