"""Speculation of Ridgeline, llama.cpp and OpenVINO GenAI: same weights and prompts, interleaved.

    python benchmarks/bench_speculation_peers.py --llama-server BIN --gguf demo-f32.gguf
        [--draft-gguf demo-draft-f32.gguf] [--openvino PYTHON --openvino-gguf demo-f16.gguf]
        [--ours none ngram auto draft] [--llama none ngram-simple …] [--workloads edit question]
        [--prompts 8] [--tokens 96] [--threads 1] [--quantization int8]

The GGUF files are the demo models through llama.cpp's own `convert_hf_to_gguf.py`. Every engine is
given every prompt (token ids, greedy, a fixed number of tokens), one engine after the other, one
sequence at a time. What counts is the time from an answer's first token to its last by the engine's
own account: tokens on the engine's clock here, `timings` of llama-server, `perf_metrics` of
OpenVINO. Medians over prompts of the ratio to our plain decoding of the same prompt, and tokens per
second of all. OpenVINO takes part as it comes, which is bfloat16 where the CPU multiplies it, and
in float32 as the others. `same`: share of the tokens that are those of our answer, up to the first
that differs (a tie that rounding decides).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench_speculation import CONFIGS, prompts_of

from ridgeline import Engine, Sampling
from ridgeline.records import Token

_SIMPLE_3 = "--spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 16"
_MAP_3 = "--spec-ngram-map-k-size-n 3 --spec-ngram-map-k-size-m 16"
LLAMA: dict[str, str] = {
    "none": "",
    "ngram-simple": "--spec-type ngram-simple",
    "ngram-simple-3": f"--spec-type ngram-simple {_SIMPLE_3}",
    "ngram-map-k-3": f"--spec-type ngram-map-k {_MAP_3}",
    "ngram-cache": "--spec-type ngram-cache",
    "draft-simple": "--spec-type draft-simple",
}


class Answered(NamedTuple):
    """Tokens, and the seconds from the first to the last."""

    tokens: list[int]
    seconds: float


Asked = Callable[[list[int], int], Answered]


def ours(engine: Engine) -> Asked:
    async def stream(prompt: list[int], count: int) -> list[Token]:
        sampling = Sampling(temperature=0.0, max_tokens=count, ignore_eos=True)
        return [e async for e in engine.stream(prompt, sampling) if isinstance(e, Token)]

    def ask(prompt: list[int], count: int) -> Answered:
        tokens = asyncio.run(stream(prompt, count))
        return Answered([token.token for token in tokens], tokens[-1].at_s - tokens[0].at_s)

    return ask


def llama(words: Sequence[str], stack: ExitStack) -> Asked:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([*words, "--port", str(port)], **quiet)  # type: ignore[call-overload]
    stack.callback(server.wait)
    stack.callback(server.terminate)
    url = f"http://127.0.0.1:{port}"
    for _ in range(100):
        if server.poll() is not None:
            raise SystemExit(f"{' '.join(words)} ended; run it by hand to see why")
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)

    def ask(prompt: list[int], count: int) -> Answered:
        order = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True}
        order |= {"cache_prompt": False, "return_tokens": True}
        body = json.dumps(order).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/completion", body, headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            reply = json.load(response)
        return Answered(reply["tokens"], reply["timings"]["predicted_ms"] / 1e3)

    return ask


def openvino(python: Path, gguf: Path, threads: int, stack: ExitStack) -> dict[str, Asked]:
    script = Path(__file__).parent / "peers/worker_lookup_openvino.py"
    pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    words = [str(python), str(script), str(gguf), str(threads)]
    worker = subprocess.Popen(words, stderr=subprocess.DEVNULL, **pipe)
    stack.callback(worker.wait)
    stack.callback(worker.stdin.close)
    if not worker.stdout.readline():
        raise SystemExit(f"{' '.join(words)} ended; run it by hand to see why")

    def ask_of(mode: str) -> Asked:
        def ask(prompt: list[int], count: int) -> Answered:
            order = {"prompt": prompt, "tokens": count, "mode": mode}
            worker.stdin.write(json.dumps(order) + "\n")
            worker.stdin.flush()
            reply = json.loads(worker.stdout.readline())
            return Answered(reply["tokens"], reply["seconds"])

        return ask

    modes = ("plain", "lookup", "plain-f32", "lookup-f32")
    return {f"openvino {mode}": ask_of(mode) for mode in modes}


def engines(args: argparse.Namespace, stack: ExitStack) -> dict[str, Asked]:
    found: dict[str, Asked] = {}
    for name in args.ours:
        options = {"num_threads": args.threads, "max_num_seqs": 1, "enable_prefix_caching": False}
        options |= {"quantization": args.quantization, "speculative_config": CONFIGS[name]}
        engine = stack.enter_context(Engine.open(args.model, **options))
        found[f"ridgeline {name}"] = ours(engine)
    threads = ["-t", str(args.threads), "-tb", str(args.threads)]
    for name in args.llama if args.llama_server else []:
        words = [str(args.llama_server), "-m", str(args.gguf), "-c", "2048", "-np", "1", *threads]
        words += LLAMA[name].split() + (["-md", str(args.draft_gguf)] if "draft" in name else [])
        found[f"llama.cpp {name}"] = llama([*words, "--poll", "0", "--no-webui"], stack)
    if args.openvino:
        found |= openvino(args.openvino, args.openvino_gguf, args.threads, stack)
    return found


def num_same(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def compare(asked: dict[str, Asked], prompts: Sequence[list[int]], count: int) -> None:
    found: dict[str, list[Answered]] = {name: [] for name in asked}
    for turn, prompt in enumerate([prompts[0], *prompts]):
        for name, ask in asked.items():
            answer = ask(prompt, count)
            if turn:  # the first warms up all engines
                found[name].append(answer)
    first = next(iter(found.values()))
    for name, answers in found.items():
        rate = sum(len(each.tokens) - 1 for each in answers) / sum(a.seconds for a in answers)
        ratios = [a.seconds / b.seconds for a, b in zip(first, answers, strict=True)]
        same = sum(num_same(a.tokens, b.tokens) for a, b in zip(first, answers, strict=True))
        share = same / sum(len(each.tokens) for each in first)
        ratio = statistics.median(ratios)
        print(f"  {name:26}{rate:9.0f} tok/s  {ratio:6.2f} of ours plain  {share:4.0%} same")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--draft-gguf", type=Path)
    parser.add_argument("--openvino", type=Path, help="the interpreter that has openvino-genai")
    parser.add_argument("--openvino-gguf", type=Path)
    parser.add_argument("--ours", nargs="+", default=["none", "ngram", "auto", "draft"])
    parser.add_argument("--llama", nargs="+", default=list(LLAMA), choices=list(LLAMA))
    parser.add_argument("--workloads", nargs="+", default=["edit", "question"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization")
    args = parser.parse_args()
    with ExitStack() as stack:
        asked = engines(args, stack)
        with Engine.open(args.model, num_threads=1, max_num_seqs=1) as engine:
            encode = engine.tokenizer.encode
        for workload in args.workloads:
            print(workload, flush=True)
            texts = prompts_of(workload, args.prompts)
            compare(asked, [encode(text) for text in texts], args.tokens)


if __name__ == "__main__":
    main()
