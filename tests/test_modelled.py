"""Cost terms of techniques.toml: every command runs, and its flags change the figures."""

from __future__ import annotations

import json
import shlex
import tomllib
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import main

pytestmark = pytest.mark.slow

ROWS = tomllib.loads(
    (Path(__file__).resolve().parent.parent / "ridgeline" / "techniques.toml").read_text("utf-8")
)["technique"]
LOADS = {
    "simulate": "--accelerator l4 --request-rate 3 --num-prompts 150 --slo 'ttft:1000 tpot:80'",
    "plan": "--accelerator l4 --request-rate 20 --slo 'ttft:2000 tpot:100'",
    "predict": "--accelerator l4 --max-concurrency 8",
}
COMMANDS = [(row["id"], command) for row in ROWS for command in row.get("modelled", [])]
BASES = {
    "dynamic-batching": "simulate --batching static",
    "selective-caching": "simulate --enable-prefix-caching",
    "disaggregation": "simulate --replicas 2",
    "draft-model-speculation": "predict --num-speculative-tokens 4 --acceptance 0.7",
    "sequence-parallelism": "predict --tensor-parallel-size 2",
}
"""What a row's command is compared with, where it has flags that are not the row's own."""
WITHOUT = {
    "chunked-prefill",
    "paged-kv",
    "sliding-window-blocks",
    "context-reduction",
    "context-compression",
    "recompute-preemption",
    "triton-layers",
    "cuda-graphs",
    "piecewise-graphs",
    "async-scheduling",
    "triton-attention",
    "flex-attention",
    "flashinfer-attention",
    "triton-linear",
    "native-attention",
    "weight-only",
    "bf16-weights",
    "fp32-panels",
    "packed-checkpoint",
    "native-int8",
    "suffix-speculation",
    "lookahead-decoding",
    "combined-speculation",
    "self-speculation",
    "medusa-speculation",
    "draft-trees",
    "eagle-speculation",
    "block-verification",
    "predicted-outputs",
    "gptq",
    "awq",
    "error-propagation",
    "smoothquant",
    "llm-int8",
    "packed-embeddings",
    "qat",
    "mixed-widths",
    "rtn",
    "nf4",
    "fp8",
    "hqq",
    "rotations",
    "structured-output",
    "beam-search",
    "bad-words",
    "thinking-budget",
    "several-models",
    "foreign-checkpoints",
    "thread-plan",
    "operator-fusion",
    "vectorisation",
    "pair-sums",
    "matrix-tiles",
    "bfloat16-tiles",
    "attention-pairs",
    "attention-tiles",
    "int8-attention-tiles",
    "integer-tensor-parallelism",
    "expert-parallelism",
    "shared-memory-collectives",
    "nccl-collectives",
    "parallelisation",
    "loop-tiling",
    "grouped-experts",
    "latent-attention",
    "delta-nets",
    "sigmoid-routing",
    "native-sampling",
    "speculation-control",
    "structured-pruning",
    "sparse-24",
    "sparse-24-int8",
    "weight-masks",
    "distillation",
    "prefix-routing",
    "ttft-routing",
    "stream-resume",
    "canary",
    "managed-fallback",
}
"""Rows without a cost term; a new row has one, or says why not (`not_modelled`)."""


@cache
def figures(command: str) -> object:
    """What the command prints as JSON, apart from its notes and commands."""
    name, _, flags = command.partition(" ")
    argv = [name, "llama-3.1-8b", *shlex.split(f"{LOADS[name]} {flags}"), "--json"]
    with redirect_stdout(StringIO()) as out:
        assert main(argv) == 0, command
    found = json.loads(out.getvalue())
    keep = found["fleets"][0] if name == "plan" else found
    return rounded(
        {key: value for key, value in keep.items() if isinstance(value, int | float | dict)}
    )


def rounded(value: Any) -> Any:
    """The value with numbers of six digits: what differs less is no difference."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


@pytest.mark.parametrize(("id", "command"), COMMANDS)
def test_figures_change(id: str, command: str) -> None:
    """Against the same command without the row's own flags."""
    name, base = command.partition(" ")[0], BASES.get(id, "")
    assert figures(command) != figures(base if base.startswith(f"{name} ") else name)


def test_a_row_has_a_cost_term_or_says_why_it_has_none() -> None:
    both = [row["id"] for row in ROWS if "modelled" in row and "not_modelled" in row]
    neither = {row["id"] for row in ROWS if not row.get("modelled") and not row.get("not_modelled")}
    assert not both and neither == WITHOUT
