"""A closed loop of clients against whole servers; for OpenVINO a loop in its process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers import environments


def rounds(peers: Any, engines: tuple[str, ...], order: dict[str, Any], count: int) -> Any:
    """Output tokens/s of each engine, by round. A server lives only while it is measured."""
    found: dict[str, list[float]] = {engine: [] for engine in engines}
    for turn in range(count):
        for engine in engines:
            found[engine].append(_one(peers, engine, order, turn))
    return found


def _one(peers: Any, engine: str, order: dict[str, Any], turn: int) -> float:
    if engine.startswith("openvino"):
        return _inside(peers.words(engine), order, turn)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with _server(_command(peers, engine, order, port), port):
        return _bench(port, order, turn)


def _inside(words: Any, order: dict[str, Any], turn: int) -> float:
    orders = [{"do": "prepare", "work": order}, {"do": "run", "seed": turn}]
    text = "".join(json.dumps(each) + "\n" for each in orders)
    done = subprocess.run(
        [str(w) for w in words], input=text, stdout=subprocess.PIPE, text=True, check=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    answer = json.loads(done.stdout.splitlines()[-1])
    return float(answer["tokens"] / answer["seconds"])


def _command(peers: Any, engine: str, order: dict[str, Any], port: int) -> list[str | Path]:
    length = order["input"] + order["output"] + 64
    threads = str(peers.threads)
    if engine.startswith("ridgeline"):
        return [
            Path(sys.executable).parent / "ridgeline", "serve", peers.models / "hf",
            "--quantization", "int4", "--lm-head-quantization", "int8",
            "--kv-cache-dtype", "bfloat16",
            "--port", str(port), "--num-threads", threads,
            "--max-num-seqs", str(order["clients"]), "--max-model-len", str(length),
        ]  # fmt: skip
    server = peers.pythons["llama_server"].parent.parent / environments.LLAMA_SERVER
    return [
        server, "-m", peers.models / "q4_0.gguf", "--port", str(port), "-t", threads,
        "-np", str(order["clients"]), "-c", str(length * order["clients"]), "--no-webui",
    ]  # fmt: skip


@contextmanager
def _server(words: list[str | Path], port: int) -> Iterator[None]:
    with subprocess.Popen(
        [str(w) for w in words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            _await(process, port)
            yield
        finally:
            process.terminate()


def _await(process: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended; run it by hand to see why")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not come up")


def _bench(port: int, order: dict[str, Any], turn: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        words = [
            Path(sys.executable).parent / "ridgeline", "bench",
            "--url", f"http://127.0.0.1:{port}", "--endpoint", "completions",
            "--random-input-len", order["input"], "--random-output-len", order["output"],
            "--num-prompts", order["requests"], "--max-concurrency", order["clients"],
            "--seed", turn, "--json", result,
        ]  # fmt: skip
        subprocess.run([str(w) for w in words], check=True, stdout=subprocess.DEVNULL, timeout=1800)
        found = json.loads(result.read_text())
    wanted = order["requests"] * order["output"]
    made = found["total_output_tokens"]
    if abs(made - wanted) > 0.02 * wanted:
        raise SystemExit(f"{made} tokens came back; {wanted} were asked for")
    return float(found["output_throughput"])
