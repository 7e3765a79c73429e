"""What KV eviction costs in quality: needles, recall over two turns, and perplexity, per budget.

    python benchmarks/bench_eviction.py [--model smollm2] [--methods streaming snapkv adakv h2o]
        [--budgets 0.25 0.5 0.75] [--items 6] [--context 400] [--result OUT.json]

Every text is served by the engine's scheduler and runner with the policy under test: the context is
the prompt, and the text behind it is fed as known tokens, so that each of them is predicted from
the tokens that the policy has kept. Budgets are shares of the prompt. An answer counts as right if
each of its tokens is the most likely one, which is what greedy generation would write.

    needle       a number in the middle of prose, and the question for it at the end of the prompt:
                 the observation window of SnapKV and Ada-KV sees the question
    before       the same, with the question behind the prompt: nothing that chooses has seen it
    second turn  two numbers and the question for one of them in the prompt; behind it the answer
                 and the question for the other number
    perplexity   held-out text of three kinds behind a context of the same text

`--result` writes the table and every single outcome.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.config.settings import Settings
from ridgeline.engine.build import assemble
from ridgeline.engine.config import resolve
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.scheduler.plan import Run
from ridgeline.plan.step_time.memory import held_tokens
from ridgeline.records import KvEviction, Request, Sampling
from ridgeline.workflows.evaluate.heldout_text import heldout_texts

TASKS = ("needle", "before", "second turn", "perplexity")
PLACES = ("harbour", "castle", "library", "station", "garden", "bridge", "museum", "market")
COLOURS = ("blue", "green", "silver", "purple", "golden", "scarlet", "white", "black")


class Item(NamedTuple):
    """A prompt, what follows it, and from which token of that on its predictions are scored."""

    task: str
    prompt: list[int]
    follows: list[int]
    first: int


class Outcome(NamedTuple):
    """Of one item: mean negative log-likelihood of its scored tokens, and whether all were first.

    `kept` is the share of its tokens that are in the cache at its end.
    """

    task: str
    nll: float
    right: bool
    kept: float


class Scores:
    """Observes the hidden states of every step and scores the tokens that follow each row."""

    def __init__(self, decoder: Decoder, scheduler: Scheduler) -> None:
        self.decoder, self.scheduler = decoder, scheduler
        self.items: dict[str, Item] = {}  # by request id
        self.found: dict[str, dict[int, tuple[float, bool]]] = {}

    def add(self, name: str, item: Item) -> None:
        """Score the item that is served as request `name`."""
        self.items[name], self.found[name] = item, {}

    def observe(self, runs: Sequence[Run], num_outputs: Sequence[int], x_TC: Tensor) -> None:
        row = 0
        for run in runs:
            name = self.scheduler.request_id_of(run)
            assert name is not None, "a run belongs to a request"
            item = self.items[name]
            tokens = [*item.prompt, *item.follows]
            begin = max(run.start, len(item.prompt) + item.first - 1)
            end = min(run.start + len(run.tokens), len(tokens) - 1)
            if begin < end:
                own = x_TC[row + begin - run.start : row + end - run.start]
                logprobs = torch.log_softmax(self.decoder.logits(own).float(), -1)
                for i, position in enumerate(range(begin, end)):
                    token = tokens[position + 1]
                    is_first = int(logprobs[i].argmax()) == token
                    self.found[name][position + 1] = (-float(logprobs[i, token]), is_first)
            row += len(run.tokens)


class Bench:
    """One engine's scheduler and runner, which serve all items of a policy at once."""

    def __init__(self, model: str) -> None:
        settings = Settings(
            model=model, max_num_seqs=8, max_model_len=2048, kv_cache_memory_bytes=1200 << 20
        )
        parts = assemble(resolve(settings))
        self.tokenizer, self.scheduler = parts.tokenizer, parts.scheduler
        runner = parts.runner
        self.scores = Scores(runner.decoder, parts.scheduler)
        self.runner = TorchRunner(
            runner.decoder, runner.cache, runner.attention, observer=self.scores
        )
        self.num_served = 0

    def run(self, items: Sequence[Item], policy: KvEviction) -> list[Outcome]:
        """The outcome of every item under a policy."""
        names = []
        for item in items:
            name, self.num_served = f"{self.num_served}", self.num_served + 1
            names.append(name)
            self.scores.add(name, item)
            sampling = Sampling(
                temperature=0.0,
                max_tokens=len(item.follows) + 1,
                ignore_eos=True,
                seed=0,
                kv_eviction=policy,
            )
            request = Request(
                id=name,
                prompt=tuple(item.prompt),
                sampling=sampling,
                arrival_s=0.0,
                resumed=(tuple(item.follows),),
            )
            self.scheduler.add(request)
        while self.scheduler.has_work:
            plan = self.scheduler.plan(0.0)
            self.scheduler.commit(plan, self.runner.run(plan), 0.0)
        return [self._outcome(name, policy) for name in names]

    def _outcome(self, name: str, policy: KvEviction) -> Outcome:
        item, found = self.scores.items.pop(name), self.scores.found.pop(name)
        assert len(found) == len(item.follows) - item.first
        nlls = [nll for nll, _ in found.values()]
        right = all(is_first for _, is_first in found.values())
        return Outcome(item.task, sum(nlls) / len(nlls), right, kept_share(item, policy))

    def items(self, count: int, context: int) -> list[Item]:
        """`count` items of each task, with contexts of about `context` tokens."""
        rng = random.Random(51)
        encode = self.tokenizer.encode
        texts = {kind: encode(text[:120_000]) for kind, text in heldout_texts().items()}
        made = []
        for i in range(count):
            prose = _window(rng, texts["prose"], context)
            depth = (i + 0.5) / count
            places = rng.sample(PLACES, 2)
            facts = [(place, rng.choice(COLOURS), rng.randint(100, 999)) for place in places]
            asked, other = facts
            for task, behind in (("needle", 0), ("before", 1)):
                at = int(depth * len(prose))
                text = prose[:at] + encode(_fact(asked)) + prose[at:]
                question, answer = encode(_question(asked)), encode(f" {asked[2]}")
                if behind:
                    made.append(Item(task, text, question + answer, len(question)))
                else:
                    made.append(Item(task, text + question, answer, 0))
            first, second = len(prose) // 4, int((0.3 + 0.6 * depth) * len(prose))
            text = prose[:first] + encode(_fact(asked)) + prose[first:second]
            text += encode(_fact(other)) + prose[second:] + encode(_question(asked))
            turn = encode(f" {asked[2]}") + encode(_question(other))
            made.append(Item("second turn", text, turn + encode(f" {other[2]}"), len(turn)))
            own = _window(rng, texts[("code", "prose", "chat")[i % 3]], context + 96)
            made.append(Item("perplexity", own[:context], own[context:], 0))
        return made


def kept_share(item: Item, policy: KvEviction) -> float:
    """The share of an item's tokens that are in the cache at its end."""
    length = len(item.prompt) + len(item.follows)
    return held_tokens(policy, len(item.prompt), length) / length


def _window(rng: random.Random, tokens: list[int], length: int) -> list[int]:
    first = rng.randrange(len(tokens) - length)
    return tokens[first : first + length]


def _fact(fact: tuple[str, str, int]) -> str:
    place, colour, number = fact
    return f"\n\nRemember this: the secret number of the {colour} {place} is {number}.\n\n"


def _question(fact: tuple[str, str, int]) -> str:
    place, colour, _ = fact
    ask = f"What is the secret number of the {colour} {place}?"
    return f"\n\nQuestion: {ask}\nAnswer: the secret number of the {colour} {place} is"


def summary(outcomes: Sequence[Outcome], full: Sequence[Outcome]) -> list[str]:
    """One row of the table: tokens kept, right answers by task, change of perplexity."""
    cells = [f"{100 * sum(o.kept for o in outcomes) / len(outcomes):.0f} %"]
    for task in TASKS[:-1]:
        own = [o.right for o in outcomes if o.task == task]
        cells.append(f"{sum(own)} of {len(own)}")
    pairs = [(a.nll - b.nll) for a, b in zip(outcomes, full, strict=True) if a.task == "perplexity"]
    mean = sum(pairs) / len(pairs)
    spread = math.sqrt(sum((p - mean) ** 2 for p in pairs) / max(1, len(pairs) - 1) / len(pairs))
    ratio = math.exp(mean)
    change = f"{100 * (ratio - 1):+.0f} ± {100 * ratio * spread:.0f} %"
    cells.append("" if outcomes is full else change)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--methods", nargs="+", default=["streaming", "snapkv", "adakv", "h2o"])
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.25, 0.5, 0.75])
    parser.add_argument("--items", type=int, default=6)
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    bench = Bench(args.model)
    items = bench.items(args.items, args.context)
    full = bench.run(items, KvEviction(method="full"))
    rows, raw = [["full cache", "", *summary(full, full)]], {"full": full}
    print(*rows[0], sep=" | ", flush=True)
    for method in args.methods:
        for budget in args.budgets:
            began_s = time.perf_counter()
            outcomes = bench.run(items, KvEviction(method=method, budget=budget))
            took_s = time.perf_counter() - began_s
            rows.append([f"`{method}`", f"{100 * budget:.0f} %", *summary(outcomes, full)])
            raw[f"{method} {budget}"] = outcomes
            print(*rows[-1], f"{took_s:.0f} s", sep=" | ", flush=True)
            if args.result:
                _write(args, rows, raw)


def _write(args: argparse.Namespace, rows: list[list[str]], raw: dict[str, Any]) -> None:
    columns = ["", "budget", "tokens kept at the end", "needle", "question behind the prompt",
               "second turn", "perplexity"]  # fmt: skip
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/bench_eviction.py --items {args.items}"
        f" --context {args.context}",
        "note": f"{args.model}, contexts of {args.context} tokens; perplexity of 96 tokens behind"
        " the context, against the full cache, with its standard error over texts.",
        "columns": columns,
        "rows": rows,
        "raw": {name: [outcome._asdict() for outcome in own] for name, own in raw.items()},
    }
    args.result.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
