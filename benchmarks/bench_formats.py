"""Every format that the engine loads: bytes per weight, decode against its bound, prefill.

    python benchmarks/bench_formats.py make FOLDER               writes the models (minutes, 3 GB)
    python benchmarks/bench_formats.py measure FOLDER [FORMAT...]   a slice, with `int4-g128`
    python benchmarks/bench_formats.py table FOLDER              all slices as one table

The models have random weights of one shape: three layers of Llama-3.2-1B's, 180 M weights, with a
vocabulary of 1,024, so that the layers decide; in 4 bits they are three times the largest cache
here. All formats of a slice are open at once and take their turns in every round, which measures
the machine's read bandwidth too: a bound is that of its round. Decode: one sequence after 128
tokens, a token per step. Prefill: a prompt of 512 in one step. Medians of rounds.

Two bounds: `of memory` is the share of the speed at which the weights *as they lie in memory* could
be read, `of file` that at which the bytes of the file could be. They differ where a format is
storage only and is computed in float32. Ratios are to `int4-g128` in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

import torch
from safetensors.torch import save_file

import ridgeline._native as _native
from ridgeline.config.improve import QuantizeOptions
from ridgeline.config.settings import settings_from
from ridgeline.engine.build import assemble
from ridgeline.engine.checkpoints.family_layouts import LAYOUTS
from ridgeline.engine.checkpoints.tensor_names import locate, parts, row_sizes
from ridgeline.engine.config import resolve
from ridgeline.engine.profiling.profile import StepDriver
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import weight_bytes
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import linears
from ridgeline.workflows.quantize.quantize import quantize

REFERENCE, CONTEXT, PROMPT = "int4-g128", 128, 512
PLAIN = {"float32": None, "bf16": "bf16"}
"""The source itself, and what `--quantization` is asked for."""
MADE: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8},
    "int4-g128": {"group_size": 128},
    "int4-g64": {"group_size": 64},
    "int4-g32": {"group_size": 32},
    "int4-g128-zeros": {"group_size": 128, "zeros": True},
    "int4-g32-zeros": {"group_size": 32, "zeros": True},
    "int3-g128": {"bits": 3, "group_size": 128},
    "ct-int8": {"bits": 8, "format": "compressed-tensors"},
    "ct-int4-g128": {"group_size": 128, "format": "compressed-tensors"},
    "ct-int3-g128": {"bits": 3, "group_size": 128, "format": "compressed-tensors"},
    "ct-fp8-channel": {"numbers": "fp8-channel", "format": "compressed-tensors"},
    "fp8-block": {"numbers": "fp8-block", "format": "fp8"},
    "gptq-g128": {"group_size": 128, "format": "gptq"},
    "awq-g128": {"group_size": 128, "format": "awq"},
    "bnb-nf4": {"numbers": "nf4", "format": "bitsandbytes"},
    "bnb-int8": {"bits": 8, "format": "bitsandbytes"},
    "gguf-q4_0": {"group_size": 32, "format": "gguf"},
    "gguf-q4_1": {"group_size": 32, "zeros": True, "format": "gguf"},
    "gguf-q5_0": {"bits": 5, "group_size": 32, "format": "gguf"},
    "gguf-q8_0": {"bits": 8, "format": "gguf"},
    "gguf-q4_k": {"numbers": "q4_k", "format": "gguf"},
    "gguf-q6_k": {"numbers": "q6_k", "format": "gguf"},
}
CONFIG = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def source(folder: Path) -> str:
    """The model in bfloat16, its weights random."""
    target = folder / "source"
    if target.exists():
        return str(target)
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    spec, generator = load_spec(str(target)), torch.Generator().manual_seed(0)
    tensors = {}
    for part in parts(spec):
        sizes = {} if part.layer is None else row_sizes(spec.layers[part.layer])
        value = torch.randn(part.shape, generator=generator) * 0.02
        value = torch.ones(part.shape) if len(part.shape) == 1 else value
        tensors[locate(part, LAYOUTS["llama"][0], sizes).name] = value.to(torch.bfloat16)
    save_file(tensors, target / "model.safetensors")
    return str(target)


def make(folder: Path, names: Sequence[str]) -> None:
    """Write every format that is not there yet."""
    dense = source(folder)
    for name in names:
        if name in MADE and not (folder / name).exists():
            shutil.rmtree(folder / f"{name}.partial", ignore_errors=True)
            quantize(dense, folder / name, QuantizeOptions(method="rtn", **MADE[name]))


def path_of(folder: Path, name: str) -> str:
    made = folder / ("source" if name in PLAIN else name)
    return str(made / "model.gguf") if name.startswith("gguf") else str(made)


def layer_weights(spec: ModelSpec) -> int:
    found = {path: each for path, each in linears(spec).items() if path != "lm_head"}
    return sum(linear.num_out * linear.num_in for linear in found.values())


def file_bytes(folder: Path, name: str, spec: ModelSpec) -> float:
    """Of the layers: the files less embedding and head, which are bfloat16 in all of them."""
    path = Path(path_of(folder, name))
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    return sum(f.stat().st_size for f in files) - 2 * 2 * spec.vocab_size * spec.hidden_size


class Contender:
    """One format's engine, its decoding sequence, and its measurements."""

    def __init__(self, folder: Path, name: str) -> None:
        asked = {
            "model": path_of(folder, name),
            "quantization": PLAIN.get(name),
            "max_model_len": 2048,
            "max_num_seqs": 4,
            "max_num_batched_tokens": PROMPT + 4,
            "enable_prefix_caching": False,
        }
        begun = time.perf_counter()
        self.name, resolved = name, resolve(settings_from(asked))
        torch.set_num_threads(resolved.num_threads)
        self.spec = resolved.spec
        self.driver = StepDriver(assemble(resolved), self.spec.vocab_size)
        self.opened_s = time.perf_counter() - begun
        self.file_bytes = file_bytes(folder, name, self.spec)
        self.backend = resolved.layer_backend
        self.decode_s: list[float] = []
        self.prefill_s: list[float] = []

    def round(self, steps: int) -> tuple[float, float]:
        """Seconds of a prompt's step, and of a step that decodes one sequence (median)."""
        prefill_s, _ = self._enter(PROMPT, 1)
        _, request_id = self._enter(CONTEXT, None)
        spent = [self._step()[0] for _ in range(steps + 2)][2:]
        self.driver.end(request_id)
        return prefill_s, statistics.median(spent)

    def _enter(self, length: int, max_tokens: int | None) -> tuple[float, str]:
        """Ask with a new prompt; seconds of the step that computes it, and the request."""
        request_id = self.driver.add(length, max_tokens)
        spent, num_rows = self._step()
        assert num_rows == length, num_rows
        return spent, request_id

    def _step(self) -> tuple[float, int]:
        begun = time.perf_counter()
        plan = self.driver.step()
        return time.perf_counter() - begun, sum(len(run.tokens) for run in plan.runs)

    def results(self, rates: list[float], baseline: Contender) -> dict[str, Any]:
        """`rates`: bytes per second that could be read in each round."""
        weights = layer_weights(self.spec)
        in_memory = weight_bytes(self.spec, 1)
        in_file = self.file_bytes + in_memory - self._layer_bytes()
        step_s, prompt_s = (statistics.median(x) for x in (self.decode_s, self.prefill_s))
        readable = [rate * s for rate, s in zip(rates, self.decode_s, strict=True)]
        faster = [b / a for a, b in zip(self.decode_s, baseline.decode_s, strict=True)]
        return {
            "format": self.name,
            "file_bytes_per_weight": self.file_bytes / weights,
            "memory_bytes_per_weight": self._layer_bytes() / weights,
            "decode_tok_s": 1 / step_s,
            "of_memory_bound": in_memory / statistics.median(readable),
            "of_file_bound": in_file / statistics.median(readable),
            "decode_ratio": statistics.median(faster),
            "prefill_tok_s": PROMPT / prompt_s,
            "prefill_ratio": statistics.median(baseline.prefill_s) / prompt_s,
            "read_gb_s": statistics.median(rates) / 1e9,
            "backend": self.backend,
            "rule": next((line for line in self.spec.rewrites), "as stored"),
            "opened_s": self.opened_s,
        }

    def _layer_bytes(self) -> float:
        found = linears(self.spec)
        return sum(linear.nbytes for path, linear in found.items() if path != "lm_head")


def read_rate(num_threads: int) -> float:
    return statistics.median(r for r, _ in _native.read_rates(256 << 20, num_threads, 3, 0.05))


def measure(folder: Path, names: Sequence[str], rounds: int, steps: int) -> list[dict[str, Any]]:
    """One slice: all formats open, interleaved."""
    with torch.inference_mode():
        found = [Contender(folder, name) for name in dict.fromkeys([REFERENCE, *names])]
        rates: list[float] = []
        for turn in range(rounds + 1):
            if turn:
                rates.append(read_rate(torch.get_num_threads()))
            for each in found:
                prefill_s, decode_s = each.round(steps if turn else 2)
                if turn:  # the first warms up
                    each.prefill_s.append(prefill_s)
                    each.decode_s.append(decode_s)
    return [each.results(rates, found[0]) for each in found]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| format | bytes per weight: file, memory | decode, tok/s | of memory's bound"
        " | of the file's bound | prefill of 512, tok/s | decode, prefill × int4-g128 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['format']} | {row['file_bytes_per_weight']:.2f}, "
            f"{row['memory_bytes_per_weight']:.2f} | {row['decode_tok_s']:.0f} | "
            f"{row['of_memory_bound']:.0%} | {row['of_file_bound']:.0%} | "
            f"{row['prefill_tok_s']:.0f} | {row['decode_ratio']:.2f}, {row['prefill_ratio']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["make", "measure", "table"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"of {[*PLAIN, *MADE]}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    unknown = set(args.formats) - {*PLAIN, *MADE}
    if unknown:
        parser.error(f"no such format: {', '.join(unknown)}")
    args.formats = args.formats or [*PLAIN, *MADE]
    kept = args.folder / "results.json"
    if args.what == "make":
        make(args.folder, args.formats)
        return
    rows = {} if not kept.exists() else json.loads(kept.read_text(encoding="utf-8"))
    if args.what == "measure":
        for row in measure(args.folder, args.formats, args.rounds, args.steps):
            rows[row["format"]] = row
        kept.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table([rows[name] for name in (*PLAIN, *MADE) if name in rows]))
    print(json.dumps([rows[name] for name in args.formats if name in rows]))


if __name__ == "__main__":
    main()
