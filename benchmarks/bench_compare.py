"""Does `ridgeline compare` tell a change from noise, on this machine, next to a CPU hog?

    python benchmarks/bench_compare.py [--pairs 20] [--changed 10] [--model demo] [--rate 12]
        [--prompts 40] [--runs 8] [--slower 0.10] [--json FILE]

One server answers all loads. A pair is two results of `ridgeline bench --url`, before and after, of
`--runs` runs each, and one `ridgeline compare` of them.

*Unchanged* pairs: nothing changes between the two. In every second one, a hog (as many busy
processes as there are CPUs) runs while the second result is measured. An exit code of 1 is a false
alarm; 3 (inconclusive) is a right answer next to a hog.

*Changed* pairs: while the second result is measured, the server is stopped for a share of its time
(SIGSTOP and SIGCONT, 10 ms a cycle), so that everything takes `--slower` longer. An exit code of 1
finds the change. Wants a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

RIDGELINE = (sys.executable, "-m", "ridgeline")
CYCLE_S = 0.010
START_S = 300.0
MEANINGS = {0: "no regression", 1: "regression", 3: "inconclusive"}


@contextlib.contextmanager
def running_server(model: str) -> Iterator[tuple[str, int]]:
    """The address of a server, and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [*RIDGELINE, "serve", model, "--port", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _await(url, process)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _await(url: str, process: subprocess.Popen[bytes]) -> None:
    stop_s = time.monotonic() + START_S
    while time.monotonic() < stop_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"{url} did not answer in {START_S:.0f} s")


@contextlib.contextmanager
def hog() -> Iterator[None]:
    """As many busy processes as there are CPUs."""
    words = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(words) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def slowed(pid: int, slower: float) -> Iterator[None]:
    """A process that everything takes `slower` longer: 0.1 is 10 %."""
    ended = threading.Event()
    stopped_s = CYCLE_S * slower / (1 + slower)

    def alternate() -> None:
        while not ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stopped_s)
            os.kill(pid, signal.SIGCONT)
            time.sleep(CYCLE_S - stopped_s)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        os.kill(pid, signal.SIGCONT)


def measure(url: str, folder: Path, args: argparse.Namespace) -> None:
    """Write `--runs` results into a folder."""
    folder.mkdir()
    words = [*RIDGELINE, "bench", "--url", url, "--log", str(folder / "run.jsonl")]
    words += ["--request-rate", str(args.rate), "--num-prompts", str(args.prompts)]
    words += ["--num-runs", str(args.runs), "--workload", args.workload]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if not any(folder.iterdir()):
        raise SystemExit(f"bench ended with {done.returncode}: {done.stderr[-1000:]}")


def compared(url: str, args: argparse.Namespace, change: contextlib.AbstractContextManager) -> int:
    """The exit code of `compare` for a pair whose second result is measured under a change."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        measure(url, before, args)
        with change:
            measure(url, after, args)
        words = [*RIDGELINE, "compare", str(before), str(after)]
        return subprocess.run(words, capture_output=True, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--changed", type=int, default=10)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--workload", default="synthetic:input=128,output=32")
    parser.add_argument("--rate", type=float, default=12.0)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--slower", type=float, default=0.10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    codes: dict[str, Counter[int]] = {"unchanged": Counter(), "hog": Counter(), "slower": Counter()}
    with running_server(args.model) as (url, pid), tempfile.TemporaryDirectory() as folder:
        measure(url, Path(folder, "warm"), args)  # all sides find their prompts in the prefix cache
        for number in range(args.pairs):
            kind = "hog" if number % 2 else "unchanged"
            change = hog() if kind == "hog" else contextlib.nullcontext()
            codes[kind][compared(url, args, change)] += 1
            print(number + 1, {k: dict(v) for k, v in codes.items()}, flush=True)
        for number in range(args.changed):
            codes["slower"][compared(url, args, slowed(pid, args.slower))] += 1
            print(number + 1, {k: dict(v) for k, v in codes.items()}, flush=True)
    false_alarms = codes["unchanged"][1] + codes["hog"][1]
    print(f"false alarms: {false_alarms} of {args.pairs}")
    print(f"changes of {args.slower:.0%} found: {codes['slower'][1]} of {args.changed}")
    if args.json is not None:
        named = {k: {MEANINGS[code]: n for code, n in v.items()} for k, v in codes.items()}
        text = json.dumps({"settings": {k: str(v) for k, v in vars(args).items()}, **named})
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
