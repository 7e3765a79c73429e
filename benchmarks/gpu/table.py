"""The figures of a run of `benchmarks/gpu/run.sh` as a Markdown table.

python benchmarks/gpu/table.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEAD = (
    "| model | weights | work | mode | ms, host to host | ms, device | tok/s | of the data sheet's "
    "bandwidth | of a copy's | MFU | times transformers |"
)


def read(path: Path) -> dict[str, Any]:
    """A JSON file; empty if it is missing or was cut off."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record


def work_of(line: dict[str, Any]) -> str:
    if line["phase"] == "prefill":
        return f"prefill of {line['tokens']:,}"
    if line["phase"] == "mixed":
        return f"{line['tokens']} of a prompt and {line['sequences']} at {line['context']}"
    return f"decode of {line['sequences']} at {line['context']}"


def rows(folder: Path) -> list[str]:
    """A row per line of the steps, with transformers' time for the same work."""
    out = []
    for steps, peer in (
        ("steps8b", "peer8b"),
        ("compiled", "peer8b"),
        ("torch_layers", "peer8b"),
        ("pieces", "peer8b"),
        ("experts", ""),
        ("nvfp4", "peer8b"),
        ("steps1b", "peer1b"),
    ):
        record = read(folder / f"{steps}.json")
        theirs = {work_of(line): line for line in read(folder / f"{peer}.json").get("lines", [])}
        for line in record.get("lines", []):
            if "error" in line:
                out.append(f"| {record['model']} | {line['format']} | {line['error'][:80]} |")
                continue
            work, peer_line = work_of(line), theirs.get(work_of(line))
            times = f"{peer_line['wall_ms'] / line['wall_ms']:.1f}" if peer_line else ""
            mode = f"{line.get('mode', 'eager')}, {line['layers']}"
            cells = [record["model"].removeprefix("dummy:"), line["format"], work, mode]
            cells += [str(line["wall_ms"]), str(line.get("device_ms") or ""), f"{line['tok_s']:,}"]
            cells += [str(line.get(name, "")) for name in ("of_bandwidth", "of_copy", "mfu")]
            out.append("| " + " | ".join([*cells, times]) + " |")
        for line in theirs.values() if steps in ("steps8b", "steps1b") else ():
            name = record.get("model", "").removeprefix("dummy:")
            figures = f"{line['wall_ms']} |  | {line['tok_s']:,} |  |  |  | 1"
            out.append(f"| {name} | bf16 | {work_of(line)} | transformers | {figures} |")
    return out


def main() -> None:
    folder = Path(sys.argv[1])
    steps = read(folder / "steps8b.json")
    copy = steps.get("copy_bytes_s", 0.0) / 1e12
    print(f"{steps.get('gpu')}, torch {steps.get('torch')}, copy {copy:.2f} TB/s\n")
    print("\n".join([HEAD, "|" + "---|" * (HEAD.count("|") - 1), *rows(folder)]))
    for name in ("engine", "speculation"):
        for line in read(folder / f"{name}.json").get("lines", []):
            print(name, line)


if __name__ == "__main__":
    main()
