"""What AIConfigurator estimates for the published points that our fit does not see.

    python benchmarks/aiconfigurator_points.py points POINTS.csv --output points.jsonl
    python benchmarks/aiconfigurator_points.py estimate points.jsonl --output estimates.jsonl

The second command runs in a separate environment with `pip install aiconfigurator` and nothing
of this project; `published_table.py --aiconfigurator estimates.jsonl` compares. Every point is
estimated as a user would: its layout, batch and formats, the newest tables of its engine, all other
arguments as they are by default. A point that the package refuses keeps its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MODELS = {
    "Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
}
"""Models that the package would download, and those of the same shape whose config.json it has."""
OWN_FORMATS = ("openai/gpt-oss-120b", "deepseek-ai/DeepSeek-R1")
"""Checkpoints that the file calls nvfp4 or fp8, and that are stored in MXFP4 and in FP8 blocks."""
WORKER = ("tp", "attention_dp", "moe_tp", "moe_ep")


def kept_points(path: Path) -> Iterator[dict[str, Any]]:
    """The arguments of `cli_estimate` for every kept point, with its row in the file."""
    from published_points import read

    with path.open(encoding="utf-8", newline="") as file:
        raw = list(csv.DictReader(file))
    for number, (row, known) in enumerate(zip(raw, read(path), strict=True)):
        if known.kept:
            yield {"row": number, "arguments": arguments_of(row, known.point.batch)}


def arguments_of(row: Mapping[str, str], concurrency: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model_path": MODELS.get(row["model_path"].split("/")[1], row["model_path"]),
        "system_name": row["system"],
        "backend_name": row["backend"],
        "mode": row["mode"],
        "isl": int(row["isl"]),
        "osl": int(row["osl"]),
        "gemm_quant_mode": row["gemm_quant_mode"] or None,
        "moe_quant_mode": row["moe_quant_mode"] or None,
    }
    is_own = row["model_path"] == OWN_FORMATS[0] or row["moe_quant_mode"] == "fp8"
    if row["model_path"] in OWN_FORMATS and is_own:
        found |= {"gemm_quant_mode": None, "moe_quant_mode": None}
    if row["mode"] == "agg":
        sizes = {name: number(row, f"{name}_size") for name in WORKER}
        found |= {f"{name}_size": size for name, size in whole_experts(sizes).items()}
        found["batch_size"] = max(1, concurrency // sizes["attention_dp"])
        return found
    for side in ("prefill", "decode"):
        sizes = {name: number(row, f"{side}_{name}_size") for name in WORKER}
        found |= {f"{side}_{name}_size": size for name, size in whole_experts(sizes).items()}
        found[f"{side}_num_workers"] = number(row, f"{side}_num_workers")
    workers = found["decode_num_workers"] * found["decode_attention_dp_size"]
    found["prefill_batch_size"] = number(row, "prefill_batch_size")
    found["decode_batch_size"] = max(1, concurrency // workers)
    return found


def number(row: Mapping[str, str], name: str) -> int:
    return int(row[name] or 1) or 1


def whole_experts(sizes: Mapping[str, int]) -> dict[str, int]:
    """The layout, where the file records tp as tp · ep or leaves out attention groups."""
    sizes = dict(sizes)
    experts = sizes["moe_tp"] * sizes["moe_ep"]
    if sizes["moe_tp"] > 1 and sizes["moe_ep"] > 1 and sizes["tp"] == experts:
        sizes["tp"] = sizes["moe_tp"]
        sizes["moe_tp"] = 1 if sizes["moe_ep"] == sizes["tp"] else sizes["moe_tp"]
        experts = sizes["moe_tp"] * sizes["moe_ep"]
    if experts > sizes["tp"] * sizes["attention_dp"] and experts % sizes["tp"] == 0:
        sizes["attention_dp"] = experts // sizes["tp"]
    return sizes


def estimate(point: Mapping[str, Any]) -> dict[str, Any]:
    """Milliseconds of TTFT and TPOT, or why there are none."""
    from aiconfigurator.cli.api import cli_estimate

    arguments = {name: value for name, value in point["arguments"].items() if value is not None}
    reason = ""
    for database in ("SILICON", "HYBRID"):  # the second estimates what was not measured
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found = cli_estimate(database_mode=database, **arguments)
        except Exception as error:  # whatever a foreign package raises is its answer
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        times = {"ttft_ms": float(found.ttft), "tpot_ms": float(found.tpot)}
        return {"row": point["row"], "database": database, **times}
    return {"row": point["row"], "error": reason}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("points", "estimate"))
    parser.add_argument("input", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with chosen.output.open("w", encoding="utf-8") as file:
        if chosen.command == "points":
            lines: Iterator[dict[str, Any]] = kept_points(chosen.input)
        else:
            texts = chosen.input.read_text(encoding="utf-8").splitlines()
            lines = (estimate(json.loads(text)) for text in texts)
        for line in lines:
            file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
