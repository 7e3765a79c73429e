"""What a request's options gain and cost: predictions, beams, bad words, thinking budgets.

    python benchmarks/bench_request_options.py [--model smollm2] [--tokens 64] [--rounds 3]
        [--result OUT.json]

One thread, one request at a time, greedy; the clock is the CPU time of the process, so that a busy
machine disturbs it less than wall time; rounds of all cases take turns. The edits ask for a source
to be repeated: a right prediction is that source, a wrong one a text of the same size that the
answer does not follow. Prints, for each case, steps and output tokens of a round, and the CPU time
against that of the same task without the option, the median over the rounds and their range.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import msgspec

from ridgeline import Engine, Sampling
from ridgeline.hub.download import ensure_downloaded
from ridgeline.records import BeamSearch, Finished

SOURCES = [
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n",
    "for name in sorted(names):\n    print(name.upper())\n    total += len(name)\n",
]
OTHER = "The harbour was quiet in the morning, and three boats lay behind the pier. " * 3
QUESTIONS = ["Name three colours.", "Why is the sky blue?", "What is a prime number?"]
WORDS = ("color", "blue", "light", "number", "red", "sky", "prime", "green", "sun", "one")
COLUMNS = ["case", "tokens", "steps", "CPU time against the task without it"]


class Case(msgspec.Struct, frozen=True):
    """Requests and their options. `base`: the case that its time is compared with."""

    name: str
    base: str
    messages: tuple[str, ...]
    sampling: Sampling
    predictions: tuple[str, ...] = ()
    opening: str = ""


def cases(num_tokens: int) -> list[Case]:
    edits = tuple(f"Repeat this code, and write nothing else:\n{text}" for text in SOURCES)
    greedy = Sampling(temperature=0.0, max_tokens=num_tokens)
    beams = Sampling(temperature=0.0, max_tokens=num_tokens, n=4, beam=BeamSearch())
    banned = Sampling(temperature=0.0, max_tokens=num_tokens, bad_words=WORDS)
    brief = Sampling(temperature=0.0, max_tokens=num_tokens, thinking_token_budget=16)
    wrong = tuple(OTHER[: len(text)] for text in SOURCES)
    asked, thinking = tuple(QUESTIONS), "<think>\n"
    return [
        Case("edits", "edits", edits, greedy),
        Case("edits, `prediction` of the source", "edits", edits, greedy, tuple(SOURCES)),
        Case("edits, `prediction` of another text", "edits", edits, greedy, wrong),
        Case("questions", "questions", asked, greedy),
        Case("questions, 4 beams", "questions", asked, beams),
        Case("questions, 10 `bad_words`", "questions", asked, banned),
        Case("open thinking", "open thinking", asked, greedy, (), thinking),
        Case("`thinking_token_budget` of 16", "open thinking", asked, brief, (), thinking),
    ]


async def run(engine: Engine, case: Case) -> tuple[float, int, int]:
    """CPU seconds, output tokens and steps of a case."""
    tokenizer, num_tokens = engine.tokenizer, 0
    steps, begun_s = engine.counters()["num_steps"], time.process_time()
    for i, text in enumerate(case.messages):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        prompt += tokenizer.encode(case.opening, add_special_tokens=False)
        expected = {"prediction": tokenizer.encode(case.predictions[i])} if case.predictions else {}
        async for event in engine.stream(prompt, case.sampling, **expected):
            if isinstance(event, Finished):
                num_tokens += event.usage.completion_tokens
    took_s = time.process_time() - begun_s
    return took_s, num_tokens, int(engine.counters()["num_steps"] - steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    ensure_downloaded(args.model)
    seconds: dict[str, list[float]] = {}
    counts: dict[str, tuple[int, int]] = {}
    size = {"kv_cache_memory_bytes": 128 << 20, "max_model_len": 1024, "num_threads": 1}
    with Engine.open(args.model, enable_prefix_caching=False, **size) as engine:
        for case in (everything := cases(args.tokens)) * (args.rounds + 1):
            took_s, *counted = asyncio.run(run(engine, case))
            seconds.setdefault(case.name, []).append(took_s)
            counts[case.name] = (counted[0], counted[1])
    rows = []
    for case in everything:
        pairs = zip(seconds[case.name][1:], seconds[case.base][1:], strict=True)
        ratios = [round(own / other, 2) for own, other in pairs]  # the first round warms up
        shown = {"median": round(statistics.median(ratios), 2), "runs": sorted(ratios)}
        rows.append([case.name, *counts[case.name], shown])
        print(*rows[-1], sep=" | ")
    if args.result:
        document = {
            "date": time.strftime("%Y-%m-%d"),
            "command": f"python benchmarks/bench_request_options.py --tokens {args.tokens}"
            f" --rounds {args.rounds}",
            "columns": COLUMNS,
            "rows": rows,
        }
        args.result.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
