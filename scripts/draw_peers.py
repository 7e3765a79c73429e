"""Draw the picture of README.md, docs/assets/peers.svg, from a benchmark result.

One group of bars per kind of work: llama.cpp is 1, the other engines are ratios to it. The tokens
per second stand at the end of each bar.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ridgeline.report import svg

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "peers-amx.json"
PICTURE = ROOT / "docs" / "assets" / "peers.svg"
WORKS = {
    "decode, 1 sequence, INT4": "decode, 1 sequence",
    "decode, 8 sequences, INT4": "decode, 8 sequences",
    "decode, 16 sequences, INT4": "decode, 16 sequences",
    "prefill of 512 tokens, INT4": "prompt of 512 tokens",
    "decode after 8,192 tokens, INT4, KV cache INT8 (earlier the same "
    "day)": "decode after 8k tokens",
    "chat over HTTP, 16 clients, 256 in, 128 out (an earlier build)": "chat, 16 clients",
}
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  fill: #1a2029; }
.strong { font-weight: 650; } .tick, .axis-title { fill: #5a6675; font-size: 12px; }
.value { font-size: 12px; }
.grid { stroke: #e4e8ee; } .axis { stroke: #aab4c0; }
.ridgeline { fill: #0c8464; } .openvino { fill: #8aa4c8; } .llamacpp { fill: #c3cad4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6eaf0; } .tick, .axis-title { fill: #9aa6b5; }
  .grid { stroke: #2b333e; } .axis { stroke: #5a6675; }
  .ridgeline { fill: #3cc79c; } .openvino { fill: #6b87b0; } .llamacpp { fill: #4a5563; }
}
"""
WIDTH, LEFT, RIGHT, TOP, GROUP, BAR = 840, 178, 800, 84, 62, 15


def last(cell: Any) -> float:
    """The newest run of a cell."""
    return float(cell["runs"][-1] if isinstance(cell, dict) else cell)


def bars(row: list[Any]) -> list[tuple[str, str, float, float]]:
    """(name, CSS class, speed relative to llama.cpp, tokens/s) of each engine."""
    ours, peer, ratio, openvino, openvino_ratio = row[1:]
    openvino = float(openvino.split()[0]) if isinstance(openvino, str) else openvino
    return [
        ("Ridgeline", "ridgeline", last(ratio), last(ours)),
        ("OpenVINO GenAI", "openvino", last(ratio) / last(openvino_ratio), last(openvino)),
        ("llama.cpp", "llamacpp", 1.0, last(peer)),
    ]


def draw() -> str:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    rows = {row[0]: row for row in result["rows"]}
    scale = svg.Scale(low=0, high=6.5, start=LEFT, end=RIGHT)
    bottom = TOP + GROUP * len(WORKS)
    parts = [
        svg.text(
            16, 28, "Tokens per second relative to llama.cpp, same weights, two cores", "strong"
        ),
        svg.x_axis(scale, TOP - 8, bottom, "speed relative to llama.cpp; labels are tokens/s"),
    ]
    for place, (_, css, _, _) in enumerate(legend := bars(rows[next(iter(WORKS))])):
        x = LEFT + 150 * place
        parts.append(svg.rect(x, 46, x + 14, 12, css))
        parts.append(svg.text(x + 20, 57, legend[place][0]))
    for place, (work, label) in enumerate(WORKS.items()):
        y = TOP + GROUP * place
        parts.append(svg.text(LEFT - 12, y + 28, label, anchor="end"))
        for line, (name, css, times, tok_s) in enumerate(bars(rows[work])):
            top = y + (BAR + 1) * line
            tip = f"{name}, {label}: {tok_s:g} tokens/s, {times:.2f} times llama.cpp"
            parts.append(svg.rect(scale(0), top, scale(times), BAR, css, tip))
            parts.append(svg.text(scale(times) + 6, top + 12, f"{tok_s:,.0f}", "value"))
    origin = (
        f"{result['machine']}, {result['date']}; 1.04 B parameters, INT4. "
        f"benchmarks/results/{RESULT.name}"
    )
    parts.append(svg.text(16, bottom + 66, origin, "tick"))
    label = "Speed of Ridgeline, OpenVINO GenAI and llama.cpp on six kinds of work"
    body = svg.drawing(WIDTH, bottom + 80, label, f"<style>{STYLE}</style>", *parts)
    return str(body).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(), encoding="utf-8")
    sys.exit(0)
