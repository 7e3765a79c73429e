"""Turn a run of `benchmarks/gpu/run.sh` into the tables that the documentation quotes.

    python benchmarks/gpu/record.py FOLDER --date 2026-11-27

Writes benchmarks/results/gpu-*.json, which `scripts/render_results.py` puts into the pages, and
keeps the raw files in benchmarks/gpu/results/.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from table import read, work_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS, RAW = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "gpu" / "results"
NAMES = {"dummy:llama-3.1-8b": "llama-3.1-8b", "dummy:llama-1b-32k": "llama-1b-32k"}
NOTE = (
    "Random weights. Host to host: from the plan to the tokens, through the runner. Device: the"
    " replay of the graph, by events. Shares are of the compulsory bytes (weights, keys and values"
    " once) or FLOPs, per device time where there is one: `sheet` of the data sheet's bandwidth"
    " (H100 3.35, H200 4.8 TB/s), `copy` of a copy measured in the same process, `of BF16 peak`: of"
    " 989 TFLOP/s of BF16, for every format"
)


def step_rows(folder: Path) -> list[list[str]]:
    """A row per line of every file of steps."""
    rows = []
    for steps, peer in (
        ("steps8b", "peer8b"),
        ("compiled", "peer8b"),
        ("torch_layers", "peer8b"),
        ("steps1b", "peer1b"),
    ):
        record, theirs = read(folder / f"{steps}.json"), read(folder / f"{peer}.json")
        peers = {work_of(line): line["wall_ms"] for line in theirs.get("lines", [])}
        copy = record.get("copy_bytes_s", 0.0)
        for line in record.get("lines", []):
            if "error" not in line and not (steps == "torch_layers" and line["phase"] != "decode"):
                rows.append(row_of(NAMES[record["model"]], line, copy, peers.get(work_of(line))))
    return rows


def row_of(model: str, line: dict[str, Any], copy: float, peer_ms: float | None) -> list[str]:
    """The cells of one line."""
    wall, device = line["wall_ms"], line.get("device_ms")
    mode = f"{line.get('mode', 'eager')}, {line['layers']} layers"
    shares = ["", "", f"{line['mfu']:.2f}"] if "mfu" in line else ["", "", ""]
    if "bytes" in line:
        seconds = (device or wall) / 1e3
        sheet = line["of_bandwidth"] * wall / (device or wall)
        shares = [f"{sheet:.2f}", f"{line['bytes'] / seconds / copy:.2f}", ""]
    times = "" if peer_ms is None else f"{peer_ms / wall:.1f}"
    cells = [model, line["format"].upper(), work_of(line), mode, f"{wall:.2f}"]
    return [*cells, f"{device:.2f}" if device else "", f"{line['tok_s']:,.0f}", *shares, times]


def machine_of(folder: Path) -> str:
    """The card, its driver and torch."""
    name, driver, memory = (folder / "gpu.txt").read_text(encoding="utf-8").strip().split(", ")
    gigabytes = round(int(memory.split()[0]) / 1024)
    torch = read(folder / "steps8b.json")["torch"]
    return f"one {name} ({gigabytes} GiB), driver {driver}, torch {torch}"


def save(name: str, record: dict[str, Any]) -> None:
    """One result, a row per line, as the other results are written."""
    head = {key: value for key, value in record.items() if key != "rows"}
    text = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    rows = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in record["rows"])
    path = RESULTS / f"{name}.json"
    path.write_text(f'{text},\n  "rows": [\n{rows}\n  ]\n}}\n', encoding="utf-8")
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--date", required=True)
    asked = parser.parse_args()
    folder = asked.folder
    base = {"machine": machine_of(folder), "date": asked.date, "command": "benchmarks/gpu/run.sh"}
    columns = ["model", "weights", "work", "mode", "ms, host to host", "ms, device", "tok/s"]
    columns += ["sheet", "copy", "of BF16 peak", "times transformers"]
    copy = read(folder / "steps8b.json")["copy_bytes_s"]
    note = f"{NOTE}. The copy ran at {copy / 1e12:.2f} TB/s."
    rows = step_rows(folder)
    save("gpu-steps", base | {"note": note, "columns": columns, "rows": rows})
    lines = [
        [
            line["format"].upper(),
            f"{line['requests']} at once",
            f"{line['output_tok_s']:,.0f}",
            f"{line['steps']:.0f}",
            f"{line['ms_per_step']:.2f}",
        ]
        for line in read(folder / "engine.json").get("lines", [])
    ]
    save(
        "gpu-engine",
        base
        | {
            "note": "`Engine.generate`, llama-3.1-8b: 512 random prompt tokens and 128 of output"
            " each, prefill included.",
            "columns": ["weights", "requests", "output tok/s", "steps", "ms per step"],
            "rows": lines,
        },
    )
    RAW.mkdir(exist_ok=True)
    for path in sorted(folder.glob("*.json")):
        if path.name != "bench.json":
            shutil.copy(path, RAW / path.name)
    shutil.copy(folder / "summary.txt", RAW / "summary.txt")


if __name__ == "__main__":
    main()
