"""Who reports what: load tools against the mock server, whose answers are known to the millisecond.

    python benchmarks/bench_load_tools.py --guidellm ENV/bin/guidellm --aiperf ENV/bin/aiperf
        --vllm ENV/bin/vllm

Every tool sends a few chat requests, one after the other, to the same scripted answers and names
its mean TTFT, its time per output token, and how many requests it counts as served. Next to them is
the truth, derived by hand for each script. The tools are installed in separate environments; only
their result files are read. Ridgeline's column is `ridgeline bench` over the same socket.

Where tools *define* a figure differently (GuideLLM's time per output token is the whole latency
over all tokens, its inter-token latency is what others call TPOT), the like figure is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ridgeline
from ridgeline.measure.mock.cases import CASES
from ridgeline.measure.mock.script import Script

NUM_REQUESTS = 5
TTFT_WITHIN_MS, TPOT_WITHIN_MS = 9.0, 3.0  # less than what any misreading of a script makes
LEFT_OUT = {"hang"}  # ends by the client's timeout, which the tools set differently
TOKENIZER = str(Path(ridgeline.__file__).parent / "assets" / "demo")


class Reported(NamedTuple):
    """Milliseconds; None: the tool gave no figure."""

    ttft_ms: float | None
    tpot_ms: float | None
    served: int


Tool = Callable[[str, str, Path], Reported]
Row = dict[str, Reported | None]
ORDER = ("ridgeline", "guidellm", "aiperf", "vllm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--guidellm", help="its executable")
    parser.add_argument("--aiperf", help="its executable")
    parser.add_argument("--vllm", help="its executable, for `vllm bench serve`")
    parser.add_argument("--script", action="append", help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="results; those that it holds are not run again")
    args = parser.parse_args()
    tools: dict[str, Tool] = {"ridgeline": _ridgeline}
    if args.guidellm:
        tools["guidellm"] = _guidellm(args.guidellm)
    if args.aiperf:
        tools["aiperf"] = _aiperf(args.aiperf)
    if args.vllm:
        tools["vllm"] = _vllm(args.vllm)
    chosen = [s for s in CASES.values() if s.name not in LEFT_OUT]
    chosen = [s for s in chosen if not args.script or s.name in args.script]
    known = _held(args.json)
    with _mock_server() as url:
        for script in chosen:
            known[script.name] = _row(script, tools, url, known.get(script.name, {}))
            if args.json:
                args.json.write_text(json.dumps(known))
    names = [name for name in ORDER if any(name in row for row in known.values())]
    rows = [(s, known[s.name]) for s in CASES.values() if known.get(s.name, {}).keys() >= {*names}]
    _print(rows, names)


def _held(path: Path | None) -> dict[str, Row]:
    """Results of earlier calls, by script and tool."""
    if path is None or not path.exists():
        return {}
    reports = json.loads(path.read_text())
    return {
        script: {tool: figures and Reported(*figures) for tool, figures in row.items()}
        for script, row in reports.items()
    }


def _row(script: Script, tools: dict[str, Tool], url: str, held: Row) -> Row:
    row = dict(held)
    for name, tool in tools.items():
        if name in held:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                row[name] = tool(url, script.name, Path(folder))
            except (OSError, LookupError, ValueError, TypeError, subprocess.SubprocessError):
                row[name] = None
        print(f"{script.name} {name} {row[name]}", file=sys.stderr, flush=True)
    return row


@contextmanager
def _mock_server() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ridgeline", "mock-server", "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            _await(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _await(port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise SystemExit("the mock server did not come up")


def _run(*words: str | Path) -> None:
    subprocess.run(
        [str(word) for word in words],
        check=True,
        timeout=180,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


# ---- the tools ---------------------------------------------------------------------------------


def _ridgeline(url: str, model: str, folder: Path) -> Reported:
    out = folder / "out.json"
    command = [sys.executable, "-m", "ridgeline", "bench", "--url", url, "--endpoint", "chat"]
    command += ["--served-model-name", model, "--num-prompts", str(NUM_REQUESTS)]
    command += ["--max-concurrency", "1", "--num-warmups", "0", "--output-json", str(out)]
    subprocess.run(command, timeout=180, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = json.loads(out.read_text())

    # vLLM's keys hold a 0 where nothing was measured, as vLLM's do; ours say that there is none.
    ttft_ms = _number(found["mean_ttft_ms"]) if found["completed"] else None
    return Reported(ttft_ms, _number(found["ridgeline"]["mean_tpot_ms"]), int(found["completed"]))


def _guidellm(program: str) -> Tool:
    def run(url: str, model: str, folder: Path) -> Reported:
        prompts, out = folder / "prompts.jsonl", folder / "out.json"
        prompts.write_text('{"prompt": "hello there world"}\n' * NUM_REQUESTS)
        _run(
            program, "run", "--disable-progress",
            "--backend", f"kind=openai_http,target={url},model={model}",
            "--profile", "kind=synchronous",
            "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
            "--data", f"kind=json_file,path={prompts}",
            "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
            "--output", f"kind=json,path={out}",
        )  # fmt: skip
        metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
        served = int(metrics["request_totals"]["successful"])

        def mean(name: str) -> float | None:
            return _number(metrics[name]["successful"]["mean"]) if served else None

        return Reported(mean("time_to_first_token_ms"), mean("inter_token_latency_ms"), served)

    return run


def _aiperf(program: str) -> Tool:
    def run(url: str, model: str, folder: Path) -> Reported:
        _run(
            program, "profile", "--model", model, "--url", url, "--endpoint-type", "chat",
            "--streaming", "--concurrency", "1", "--request-count", str(NUM_REQUESTS),
            "--tokenizer", TOKENIZER, "--ui", "none", "--use-server-token-count",
            "--synthetic-input-tokens-mean", "8", "--artifact-dir", folder,
        )  # fmt: skip
        found: dict[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_text())

        def average(name: str) -> float | None:
            return _number((found.get(name) or {}).get("avg"))

        return Reported(
            average("time_to_first_token"),
            average("inter_token_latency"),
            int(average("request_count") or 0),
        )

    return run


def _vllm(program: str) -> Tool:
    def run(url: str, model: str, folder: Path) -> Reported:
        _run(
            program, "bench", "serve", "--backend", "openai-chat", "--base-url", url,
            "--endpoint", "/v1/chat/completions", "--model", model, "--tokenizer", TOKENIZER,
            "--dataset-name", "random", "--random-input-len", "8", "--random-output-len", "16",
            "--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "1", "--disable-tqdm",
            "--ready-check-timeout-sec", "0", "--save-result", "--result-dir", folder,
            "--result-filename", "out.json",
        )  # fmt: skip
        found = json.loads((folder / "out.json").read_text())
        served = int(found["completed"])

        def mean(name: str) -> float | None:
            return _number(found[name]) if served else None

        return Reported(mean("mean_ttft_ms"), mean("mean_tpot_ms"), served)

    return run


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# ---- the table ---------------------------------------------------------------------------------


def _print(rows: list[tuple[Script, Row]], names: list[str]) -> None:
    """Markdown. A cell is TTFT / TPOT in ms and, where not all, how many of 5 it called served."""
    print("| script | truth | " + " | ".join(names) + " |")
    print("|---" * (2 + len(names)) + "|")
    right = dict.fromkeys(names, 0)
    for script, row in rows:
        truth = _truth(script)
        cells = []
        for name in names:
            agrees = _agrees(row[name], truth)
            right[name] += agrees
            cells.append(_cell(row[name]) + ("" if agrees else " ✗"))
        print(f"| {script.name}: {script.about} | {_cell(truth)} | " + " | ".join(cells) + " |")
    print(
        f"\nright (TTFT within {TTFT_WITHIN_MS:.0f} ms, TPOT within {TPOT_WITHIN_MS:.0f} ms): "
        + ", ".join(f"{name} {count}/{len(rows)}" for name, count in right.items())
    )


def _truth(script: Script) -> Reported:
    truth = script.truth
    served = NUM_REQUESTS if truth.outcome == "ok" else 0
    if not served:
        return Reported(None, None, 0)
    return Reported(
        *(None if s is None else 1000 * s for s in (truth.ttft_s, truth.tpot_s)), served
    )


def _agrees(found: Reported | None, truth: Reported) -> bool:
    if found is None or found.served != truth.served:
        return False
    if not truth.served:
        return True
    return _near(found.ttft_ms, truth.ttft_ms, TTFT_WITHIN_MS) and _near(
        found.tpot_ms, truth.tpot_ms, TPOT_WITHIN_MS
    )


def _near(a: float | None, b: float | None, within: float) -> bool:
    """An undefined figure must not be given as a number; 0 for "none" is a number."""
    if a is None or b is None:
        return a is b
    return abs(a - b) <= within


def _cell(found: Reported | None) -> str:
    if found is None:
        return "no result"
    if not found.served:
        return "0 served"
    figures = " / ".join("–" if ms is None else f"{ms:.1f}" for ms in found[:2])
    return figures if found.served == NUM_REQUESTS else f"{figures} ({found.served} served)"


if __name__ == "__main__":
    main()
