"""Cost terms of techniques.toml: every command runs, and its flags change the figures."""

from __future__ import annotations

import json
import shlex
import tomllib
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from ridgeline.cli.main import main
from tests.plan.test_calibration import made_up

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
    "draft-model-speculation": "predict --num-speculative-tokens 4 --acceptance 0.7"
    " --max-concurrency 4",
    "sequence-parallelism": "predict --tensor-parallel-size 2",
    "chunked-prefill": "simulate --max-num-batched-tokens 512",
    "paged-kv": "simulate --input-len 1100 --request-rate 20",
    "context-reduction": "plan --cached-share 0.6",
    "recompute-preemption": "simulate --input-len 3000 --output-len 1000 --max-num-seqs 6",
    "cuda-graphs": "simulate llama-3.2-1b --accelerator h100-sxm",
    "piecewise-graphs": "simulate llama-3.2-1b --accelerator h100-sxm --input-len 64"
    " --output-len 1",
    "weight-only": "predict --quantization int8",
    "bf16-weights": "predict qwen2.5-0.5b --calibration FILE --quantization float32",
    "native-int8": "predict qwen2.5-0.5b --calibration FILE --quantization bfloat16",
    "packed-checkpoint": "simulate --autoscale 3 --target-in-flight 2 --startup-s 20",
    "combined-speculation": "predict --num-speculative-tokens 4 --acceptance 0.7"
    " --draft-model llama-3.2-1b --max-concurrency 4",
    "draft-trees": "predict --speculative-config"
    ' \'{"method":"medusa","num_speculative_tokens":1}\' --acceptance 0.4',
    "predicted-outputs": "predict --num-speculative-tokens 8 --acceptance 0.9",
    "speculation-control": "predict --speculative-config"
    ' \'{"method":"ngram","num_speculative_tokens":8}\' --acceptance 0.2'
    " --max-concurrency 20",
    "gptq": "predict --quantization int4",
    "awq": "predict --quantization int4",
    "qat": "predict --quantization int4 --quantization-method gptq",
    "hqq": "predict --quantization int4 --quantization-method rtn",
    "error-propagation": "predict --quantization int4 --quantization-method rtn",
    "smoothquant": "predict --quantization int8",
    "llm-int8": "predict --quantization int8",
    "packed-embeddings": "predict llama-3.2-1b",
    "mixed-widths": "predict --quantization int4",
    "fp8": "predict --quantization fp8",
    "rotations": "predict llama-3.2-1b",
    "several-models": "simulate --quantization fp8",
    "foreign-checkpoints": "predict gpt-oss-20b --accelerator h100-sxm --quantization bfloat16",
    "integer-tensor-parallelism": "predict --quantization int8",
    "expert-parallelism": "predict qwen3-30b-a3b --accelerator h100-sxm --tensor-parallel-size 2",
    "grouped-experts": "predict qwen3-30b-a3b --accelerator h100-sxm"
    " --what-if experts_per_token=128",
    "delta-nets": "predict qwen3.5-4b --input-len 4096 --what-if attention_every=1",
    "sparse-24-int8": "predict --quantization int8",
    "prefix-routing": "simulate --replicas 4 --enable-prefix-caching --pinned-len 512"
    " --pinned-prefixes 40",
    "ttft-routing": "simulate --replicas 2",
    "stream-resume": "simulate --replicas 2 --mtbf-s 20 --repair-s 5 --no-resume-requests",
}
"""What a row's command is compared with, where it has flags that are not the row's own."""
FURTHER_MODEL = '[[model]]\nmodel = "llama-3.2-1b"\nrate = 2.0\n'


@cache
def figures(command: str) -> object:
    """What the command prints as JSON, apart from its notes and commands."""
    name, *words = shlex.split(command)
    model = "llama-3.1-8b" if not words or words[0].startswith("-") else words.pop(0)
    load = shlex.split(LOADS[name])
    if "--calibration" in words:
        load = load[2:]  # the device is that of the calibration
    load = [
        word
        for pair in zip(load[::2], load[1::2], strict=True)
        for word in pair
        if pair[0] not in words
    ]
    with TemporaryDirectory() as folder:
        argv = [name, model, *load, *with_file(words, Path(folder)), "--json"]
        with redirect_stdout(StringIO()) as out:
            assert main(argv) == 0, command
    found = json.loads(out.getvalue())
    keep = found["fleets"][0] if name == "plan" else found
    return rounded(
        {key: value for key, value in keep.items() if isinstance(value, int | float | dict)}
    )


def with_file(words: list[str], folder: Path) -> list[str]:
    """The words with the file that FILE stands for: further models, or a calibration."""
    if "FILE" not in words:
        return words
    path = folder / "file"
    if "--calibration" in words:
        path.write_bytes(msgspec.json.encode(made_up()))
    else:
        path.write_text(FURTHER_MODEL, encoding="utf-8")
    return [str(path) if word == "FILE" else word for word in words]


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
    neither = [row["id"] for row in ROWS if not row.get("modelled") and not row.get("not_modelled")]
    assert not both and not neither, (both, neither)


def test_reasons_are_of_their_rows() -> None:
    """Each says where the row's cost is; none is pasted from another row."""
    reasons = [row["not_modelled"] for row in ROWS if "not_modelled" in row]
    assert len(reasons) == len(set(reasons)) and all(len(text) > 60 for text in reasons)
