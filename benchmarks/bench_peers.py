"""Ridgeline, llama.cpp, OpenVINO GenAI and vLLM: same weights, same workloads, interleaved.

    make bench-peers
    python benchmarks/bench_peers.py [--home build/peers] [--works decode-1,prefill-512]
        [--rounds 5] [--json FILE] [--shape llama-1b-32k]

Creates a separate environment for each peer and the same random weights in each one's format
(once, in `--home`: about 14 GB and half an hour of compiling). Every engine is a process that
keeps its model; in each round every engine does one slice of the work, one after the other, so that
a host whose speed drifts drifts for all of them. A ratio is the median over rounds of the ratio
within a round.

Weights: ours INT4 in groups of 128 with an 8-bit head (`--lm-head-quantization int8`, which is not
our default, because all peers round theirs); llama.cpp's Q4_0 (groups of 32, 6-bit head);
OpenVINO's INT4 in groups of 128 with an 8-bit head. INT8 against Q8_0, bfloat16 against
vLLM. Keys and values are in 16 bits (OpenVINO: 8, as by itself), except at 8k tokens, where all
keep 8 bits. `chat` is a closed loop of clients over HTTP (`ridgeline bench`), for OpenVINO, which
brings no server, a loop in its process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from peers import chat, environments

import ridgeline._native as _native
from ridgeline.config.settings import settings_from
from ridgeline.engine.config import resolve
from ridgeline.modelspec.cost import decode_work

HERE = Path(__file__).parent


class Group(NamedTuple):
    """Engines that are compared with one another; the first is ours."""

    engines: tuple[str, ...]


class Work(NamedTuple):
    group: Group
    order: dict[str, Any]
    slice: dict[str, Any]
    asked: dict[str, float]
    """Least ratio to each peer that the project has set itself."""


# Keys and values in 16 bits, as llama.cpp and vLLM keep them (OpenVINO: 8); kv8: llama.cpp too.
INT4 = Group(("ridgeline-int4-kv16-head8", "llama.cpp-q4_0", "openvino-int4"))
INT8 = Group(("ridgeline-int8-kv16", "llama.cpp-q8_0"))
BF16 = Group(("ridgeline-bf16-kv16", "vllm-bf16"))
LONG = Group(("ridgeline-int4-kv8-head8", "llama.cpp-q4_0-kv8", "openvino-int4"))


def _decode(group: Group, sequences: int, steps: int, **asked: float) -> Work:
    order = {"kind": "decode", "sequences": sequences, "context": 128}
    return Work(group, order, {"steps": steps}, asked)


def _prefill(group: Group, tokens: int, **asked: float) -> Work:
    return Work(group, {"kind": "prefill", "tokens": tokens}, {}, asked)


CHAT = {"kind": "chat", "clients": 16, "requests": 32, "input": 256, "output": 128}
WORKS = {
    "decode-1": _decode(INT4, 1, 24, openvino=1.4, llama=1.6),
    "decode-8": _decode(INT4, 8, 10, openvino=1.6, llama=3.5),
    "decode-16": _decode(INT4, 16, 8, openvino=1.6, llama=3.5),
    "prefill-512": _prefill(INT4, 512, openvino=1.6, llama=4.0),
    "prefill-2048": _prefill(INT4, 2048, openvino=1.6, llama=4.0),
    "int8-decode-1": _decode(INT8, 1, 16, llama=1.3),
    "int8-decode-8": _decode(INT8, 8, 8, llama=1.3),
    "int8-prefill-512": _prefill(INT8, 512, llama=3.0),
    "bf16-decode-1": _decode(BF16, 1, 8),
    "bf16-decode-8": _decode(BF16, 8, 6),
    "bf16-prefill-512": _prefill(BF16, 512),
    "decode-1-at-8k": Work(
        LONG, {"kind": "decode", "sequences": 1, "context": 8192}, {"steps": 12}, {}
    ),
    "chat": Work(INT4, CHAT, {}, {"openvino": 1.5, "llama": 1.5}),
}


class Worker:
    """One engine in a separate process."""

    def __init__(self, words: Iterable[str | Path]) -> None:
        self.process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.ready = self._answer()

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args!r} ended; run it by hand to see why")
        return dict(json.loads(line))

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


class Peers(NamedTuple):
    pythons: dict[str, Path]
    models: Path
    threads: int

    def words(self, engine: str) -> list[str | Path]:
        """The command of an engine's worker."""
        name, *rest = engine.split("-")
        threads = str(self.threads)
        if name == "ridgeline":
            flags = json.dumps(ridgeline_flags(rest))
            script = HERE / "peers/worker_ridgeline.py"
            return [sys.executable, script, self.models / "hf", threads, flags]
        if name == "llama.cpp":
            kv = ["q8_0"] if "kv8" in rest else []
            script = HERE / "peers/worker_llama_cpp.py"
            model = self.models / f"{rest[0]}.gguf"
            return [self.pythons["llama_cpp"], script, model, threads, *kv]
        if name == "openvino":
            script = HERE / "peers/worker_openvino.py"
            return [self.pythons["openvino"], script, self.models, threads]
        script = HERE / "peers/worker_vllm.py"
        return [self.pythons["vllm"], script, self.models / "hf", threads]


def ridgeline_flags(words: list[str]) -> dict[str, Any]:
    flags: dict[str, Any] = {"quantization": words[0], "max_model_len": 16384}
    more = {
        "kv8": {"kv_cache_dtype": "int8"},
        "kv16": {"kv_cache_dtype": "bfloat16"},
        "head8": {"lm_head_quantization": "int8"},
    }
    for word in words[1:]:
        flags |= more[word]
    return flags


class Live:
    """The workers that run: those of one group at a time, kept from work to work."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._workers: dict[str, Worker] = {}

    def of(self, engines: tuple[str, ...]) -> dict[str, Worker]:
        for engine in [worker for worker in self._workers if worker not in engines]:
            self._workers.pop(engine).stop()
        for engine in engines:
            if engine not in self._workers:
                self._workers[engine] = Worker(self._peers.words(engine))
        return {engine: self._workers[engine] for engine in engines}


def compare(peers: Peers, live: Live, name: str, work: Work, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    workers = live.of(work.group.engines)
    for worker in workers.values():
        worker.ask(do="prepare", work=work.order)
        worker.ask(do="run", seed=0, **work.slice)
    found: dict[str, list[float]] = {engine: [] for engine in workers}
    reads, needed = [], _step_bytes(peers, work)
    for turn in range(rounds):
        reads.append(_read_rate(needed, peers.threads))
        for engine, worker in workers.items():
            answer = worker.ask(do="run", seed=turn + 1, **work.slice)
            found[engine].append(answer["tokens"] / answer["seconds"])
    rss = {engine: worker.ready["rss_bytes"] for engine, worker in workers.items()}
    row = _row(name, work, found) | {"read_bytes_s": statistics.median(reads), "rss_bytes": rss}
    if work.order["kind"] == "decode":
        row["of_bandwidth_bound"] = _of_bound(work, needed, found, reads)
    return row


def _row(name: str, work: Work, found: dict[str, list[float]]) -> dict[str, Any]:
    ours, *others = work.group.engines
    ratios = {}
    for other in others:
        pairs = zip(found[ours], found[other], strict=True)
        ratios[other] = statistics.median(a / b for a, b in pairs)
    asked = {o: least for o in others for peer, least in work.asked.items() if o.startswith(peer)}
    rates = {engine: statistics.median(rounds) for engine, rounds in found.items()}
    return {"work": name, "tok_s": rates, "rounds": found, "ratios": ratios, "asked": asked}


def _of_bound(work: Work, needed: int, found: dict[str, list[float]], reads: list[float]) -> float:
    """Share of the bandwidth bound that ours reaches: bytes of a step over read rate and time."""
    rounds = zip(found[work.group.engines[0]], reads, strict=True)
    return statistics.median(
        needed / read * rate / work.order["sequences"] for rate, read in rounds
    )


def _step_bytes(peers: Peers, work: Work) -> int:
    """What a decode step of ours reads, or a prompt's weights."""
    flags = ridgeline_flags(work.group.engines[0].split("-")[1:])
    spec = resolve(settings_from({"model": str(peers.models / "hf"), **flags})).spec
    order = work.order
    return int(decode_work(spec, order.get("sequences", 1), order.get("context", 1)).bytes)


def _read_rate(num_bytes: int, threads: int) -> float:
    """Bytes per second of repeated reads of `nbytes`: caches keep as much of them as of a model."""
    return statistics.median(rate for rate, _ in _native.read_rates(num_bytes, threads, 3, 0.1))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| work | tok/s of ours | peer | its tok/s | ratio | asked |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours, *others = row["tok_s"]
        bound = row.get("of_bandwidth_bound")
        mine = f"{row['tok_s'][ours]:.1f}" + (f" ({bound:.0%} of bandwidth)" if bound else "")
        for other in others:
            least = row["asked"].get(other)
            asked = f"{least:.1f}" if least else ""
            ratio = f"{row['ratios'][other]:.2f}"
            cells = (row["work"], mine, other, f"{row['tok_s'][other]:.1f}", ratio, asked)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _kept(work: Work, absent: tuple[str, ...]) -> Work:
    """The work without some peers."""
    engines = tuple(e for e in work.group.engines if not e.startswith(absent))
    return work._replace(group=Group(engines))


def needed(works: dict[str, Work]) -> list[str]:
    """The environments that these works need; llama.cpp's also writes the models."""
    engines = {engine for work in works.values() for engine in work.group.engines}
    words = {engine.split("-")[0].replace("llama.cpp", "llama_cpp") for engine in engines}
    server = {"llama_server" for work in works.values() if work.order["kind"] == "chat"}
    return sorted((words | server | {"llama_cpp"}) - {"ridgeline"})


def models(python: Path, home: Path, shape: str) -> Path:
    """The folder of the weights, written where they are not yet."""
    shapes = tomllib.loads((HERE.parent / "ridgeline/modelspec/families/shapes.toml").read_text())
    config = {key: value for key, value in shapes[shape].items() if key != "source"}
    (home / f"{shape}.json").write_text(json.dumps(config))
    script = HERE / "peers/make_models.py"
    subprocess.run([python, script, home / f"{shape}.json", home / shape], check=True)
    return home / shape


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--home", type=Path, default=environments.HOME)
    parser.add_argument("--works", default=",".join(WORKS), help=f"of {', '.join(WORKS)}")
    parser.add_argument("--without", default="", help="peers to leave out: openvino,vllm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--shape", default="llama-1b-32k")
    parser.add_argument("--json", type=Path, help="rows are added to those that it has")
    args = parser.parse_args()
    absent = tuple(name for name in args.without.split(",") if name)
    unknown = [name for name in args.works.split(",") if name not in WORKS]
    if unknown:
        parser.error(f"--works: no work {unknown[0]!r}; there are {', '.join(WORKS)}")
    chosen = {name: _kept(WORKS[name], absent) for name in args.works.split(",")}
    pythons = environments.ensure(args.home, needed(chosen))
    folder = models(pythons["llama_cpp"], args.home, args.shape)
    if "openvino" in pythons:
        script = HERE / "peers/make_openvino.py"
        subprocess.run([pythons["openvino"], script, folder], check=True)
    peers = Peers(pythons, folder, args.threads)
    rows = {row["work"]: row for row in _before(args.json)}
    live = Live(peers)
    for name, work in chosen.items():
        if work.order["kind"] == "chat":
            live.of(())
            found = chat.rounds(peers, work.group.engines, work.order, args.rounds)
            rows[name] = _row(name, work, found)
        else:
            rows[name] = compare(peers, live, name, work, args.rounds)
        print(table([rows[name]]), file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    live.of(())
    print(table([rows[name] for name in WORKS if name in rows]))


def _before(path: Path | None) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())) if path and path.exists() else []


if __name__ == "__main__":
    main()
