"""Prefill and decode steps of an engine, operator by operator, for several numbers of sequences.

    python benchmarks/bench_step.py [--model dummy:llama-1b-32k] [--quantization int4]
        [--activations int8] [--kv-cache-dtype auto] [--sequences 1,8,64] [--context 128]
        [--prompt N] [--steps 15] [--layer-backend auto] [--json FILE] [--html FOLDER]

`ridgeline diagnose MODEL --profile` for each number in turn, on one engine; its words are explained
in docs/concepts/kernels.md. The ceilings are measured around each. `--html` draws a page for each
number: the roofline with every operator on it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

from ridgeline.config.settings import settings_from
from ridgeline.diagnose.roofline.operators import judge
from ridgeline.engine.build import EngineParts, assemble
from ridgeline.engine.config import MAX_NUM_BATCHED_TOKENS, ResolvedSettings, resolve
from ridgeline.engine.profiling.profile import ProfileOptions, profile
from ridgeline.hardware.ceilings import ceilings_of
from ridgeline.modelspec.cost.kv_layout import BLOCK_SIZE
from ridgeline.workflows.diagnose.operator_profile import ProfileResult


def profile_steps(
    resolved: ResolvedSettings, parts: EngineParts, options: ProfileOptions
) -> ProfileResult:
    """The operators for one batch size, against ceilings measured before and after."""
    before = ceilings_of(resolved.device, resolved.num_threads)
    phases = profile(parts, resolved, options)
    ceilings = before.best_of(ceilings_of(resolved.device, resolved.num_threads))
    target = f"{resolved.model}, {options.batch} sequences"
    return ProfileResult(profile=judge(target, phases, resolved.spec, ceilings))


def print_profile(result: ProfileResult) -> None:
    """A line per operator: its time, its share of the pass, and the share of its bound."""
    print(result.profile.target)
    for phase in result.profile.phases:
        pass_ms, bound_ms = 1e3 * phase.pass_s, 1e3 * phase.bound_s
        print(f"{phase.phase}: {phase.what}, {pass_ms:.4g} ms, bound {bound_ms:.4g} ms")
        for row in phase.rows:
            of_bound = "" if row.of_bound is None else f"  {row.of_bound:.0%} of {row.limit}"
            print(f"  {row.title:<32} {1e3 * row.time_s:9.4g} ms {row.share:5.0%}{of_bound}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="dummy:llama-1b-32k")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--lm-head-quantization", default=None)
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--sequences", default="1,8,64")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=None, help="to prefill (as the context)")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--layer-backend", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--html", type=Path, default=None)
    asked = parser.parse_args()
    runs = [
        ProfileOptions(
            prompt=asked.prompt or asked.context,
            batch=int(count),
            context=asked.context,
            passes=asked.steps,
        )
        for count in asked.sequences.split(",")
    ]
    settings = settings_from(
        {
            "model": asked.model,
            "quantization": None if asked.quantization == "none" else asked.quantization,
            "lm_head_quantization": asked.lm_head_quantization,
            "activations": asked.activations,
            "kv_cache_dtype": asked.kv_cache_dtype,
            "layer_backend": asked.layer_backend,
            "num_threads": asked.threads,
            "max_model_len": BLOCK_SIZE  # a block each to grow into while others join
            + max(
                max(run.prompt + 1, run.decode_tokens(MAX_NUM_BATCHED_TOKENS["cpu"]))
                for run in runs
            ),
            "max_num_seqs": max(run.batch for run in runs),
            "enable_prefix_caching": False,
        }
    )
    resolved = resolve(settings)
    parts, results = assemble(resolved), []
    for options in runs:
        result = profile_steps(resolved, parts, options)
        print_profile(result)
        if asked.html:
            asked.html.mkdir(parents=True, exist_ok=True)
            result.save(asked.html / f"{options.batch}-sequences.html")
        results.append(result.to_dict())
    print(json.dumps(results))
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
