"""Speculation against plain decoding: the gain per drafter and workload, and that it never loses.

    python benchmarks/bench_speculation.py [--configs none ngram draft] [--batches 1 8 32]
        [--workloads edit question free] [--tokens 96] [--repeats 3] [--model demo]
        [--drafter medusa=DIR]

One engine per drafter answers prompts, and takes turns with itself: `TURN` steps without drafts, as
many with them, and so on, so that whatever else happens on the machine happens to both. Every turn
is timed from step to step; the ratio of tokens per second is that of all turns together, and its
error comes from resampling pairs of neighbouring turns (5 to 95 %). Steps with prompts are left
out. `none` draws the same lots without drafts: what the noise is.

Workloads: `edit` (source is to be repeated with a change: much of the answer is in the prompt),
`question` (a document, then a question on it), `free` (held-out text goes on, sampled at 0.8 with a
seed: little repeats). Each with greedy decoding but the last. Prompts are cut from the held-out
texts that ship with Ridgeline and differ from sequence to sequence. `booked` is the controller's
own account: saved less lost time, over the time of the drafting turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any

from ridgeline import Engine, Sampling
from ridgeline.engine.core.drafting import Drafts, NoDrafts, Open, Room, Verdict

CONFIGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "lookahead": {"method": "lookahead"},
    "draft": {"method": "draft_model", "model": "demo-draft"},
    "self": {"method": "self"},
    "auto": {"method": "auto", "model": "demo-draft"},
}
HELDOUT = files("ridgeline") / "assets" / "heldout"
TURN = 8  # steps


class Switching:
    """Drafts in every other turn; times both sorts of turn."""

    def __init__(self, inner: Drafts, engine: Engine) -> None:
        self._inner, self._scheduler = inner, engine._loop.scheduler
        self.turns: list[tuple[bool, float, int]] = []  # with drafts?, seconds, tokens
        self.reset()

    def reset(self) -> None:
        self.turns, self._num_steps, self._with = [], 0, False
        self._last: tuple[float, int, int] | None = None
        self._spent_s, self._num_tokens = 0.0, 0

    def wants(self) -> bool:
        """Called once per step, while it is planned."""
        self._note()
        if self._num_steps % TURN == 0:
            self.turns.append((self._with, self._spent_s, self._num_tokens))
            self._spent_s, self._num_tokens, self._with = 0.0, 0, not self._with
        self._num_steps += 1
        return self._with and self._inner.wants()

    def _note(self) -> None:
        """The step that has just ended, unless it carried prompts or others joined."""
        totals, now_s = self._scheduler.totals, time.perf_counter()
        drafted = self._scheduler.drafting.totals.num_tokens
        now = now_s, totals.num_sampled, totals.num_tokens - drafted
        if self._last is not None:
            num_sampled, num_rows = now[1] - self._last[1], now[2] - self._last[2]
            if num_rows == len(self._scheduler._roster.running) and num_sampled >= num_rows:
                self._spent_s += now_s - self._last[0]
                self._num_tokens += num_sampled
        self._last = now

    def propose(self, opens: Sequence[Open], room: Room) -> list[tuple[int, ...]]:
        return self._inner.propose(opens, room)

    def learn(self, verdicts: Sequence[Verdict]) -> None:
        self._inner.learn(verdicts)

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self._inner.forget(seq_id, tokens, tenant)

    def numbers(self) -> dict[str, float]:
        return self._inner.numbers()


def switched(engine: Engine) -> Switching:
    """The engine's drafts, in every other turn from now on."""
    drafting = engine._loop.scheduler.drafting
    drafting._drafts = found = Switching(drafting._drafts or NoDrafts(), engine)
    return found


def texts(name: str, size: int, count: int) -> list[str]:
    """`count` different pieces of a held-out text."""
    whole = (HELDOUT / name).read_text(encoding="utf-8")
    step = max(1, (len(whole) - size) // max(1, count))
    return [whole[i * step : i * step + size] for i in range(count)]


def prompts_of(workload: str, count: int) -> list[str]:
    if workload == "edit":
        pieces = texts("code.txt", 500, count)
        return [f"{piece}\n\n# The same again:\n{piece[:160]}" for piece in pieces]
    if workload == "question":
        return [f"{piece}\n\nIn short: {piece[:40]}" for piece in texts("docs.txt", 700, count)]
    return texts("code.txt", 300, count)


def sampling_of(workload: str, tokens: int) -> Sampling:
    if workload == "free":
        return Sampling(temperature=0.8, seed=1, max_tokens=tokens, ignore_eos=True)
    return Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)


Turn = tuple[bool, float, int]


def speed(turns: Sequence[Turn]) -> float:
    return sum(num for *_, num in turns) / sum(seconds for _, seconds, _ in turns)


def ratio_of(turns: Sequence[Turn]) -> tuple[float, float, float]:
    """Speed with drafts over speed without; 5 and 95 % of what resampled pairs of turns give."""
    timed = [turn for turn in turns if turn[1] > 0 and turn[2] > 0]
    pairs = [(a, b) for a, b in pairwise(timed) if a[0] != b[0]]
    if not pairs:
        raise SystemExit("no two turns to compare: more --tokens or --repeats")
    rng = random.Random(3)

    def over(chosen: Sequence[tuple[Turn, Turn]]) -> float:
        flat = [turn for pair in chosen for turn in pair]
        return speed([t for t in flat if t[0]]) / speed([t for t in flat if not t[0]])

    spread = sorted(over(rng.choices(pairs, k=len(pairs))) for _ in range(300))
    return over(pairs), spread[15], spread[285]


def compare(
    engine: Engine, drafts: Switching, prompts: Sequence[Any], sampling: Sampling, batch: int
) -> dict[str, float]:
    """The ratio, what was drafted and accepted, and the controller's own account. `batch` prompts
    at a time, none twice: `suffix` would know its answer."""
    engine.generate(prompts[:batch], sampling)
    before, turns = dict(engine.counters()), []
    for first in range(batch, len(prompts), batch):
        drafts.reset()
        engine.generate(prompts[first : first + batch], sampling)
        turns += drafts.turns
    counts = {name: value - before.get(name, 0.0) for name, value in engine.counters().items()}
    ratio, low, high = ratio_of(turns)
    with_s = sum(seconds for drafting, seconds, _ in turns if drafting)
    drafted = counts["spec_decode_num_draft_tokens"]
    saved_s = counts.get("speculation_saved_s", 0.0) - counts.get("speculation_lost_s", 0.0)
    promised_s = counts.get("speculation_promised_s", 0.0)
    num_with = sum(num for drafting, _, num in turns if drafting)
    return {
        "plain_tok_s": speed([turn for turn in turns if not turn[0]]),
        "ratio": ratio,
        "low": low,
        "high": high,
        "booked": 1 + saved_s / with_s,
        "predicted": 1 + promised_s / (with_s + saved_s - promised_s),
        "drafted_per_token": drafted / max(1, num_with),
        "accepted": counts["spec_decode_num_accepted_tokens"] / drafted if drafted else 0.0,
        "steps_ms": 1e3 * statistics.median(s / TURN for w, s, _ in turns if not w and s > 0),
    }


HEAD = f"{'config':10}{'workload':12}{'batch':>6}{'plain tok/s':>13}{'ratio':>8}  5..95 %"


def show(name: str, workload: str, batch: int, found: dict[str, float]) -> None:
    print(
        f"{name:10}{workload:12}{batch:6}{found['plain_tok_s']:13.0f}{found['ratio']:8.3f}  "
        f"{found['low']:.2f}..{found['high']:.2f}  booked {found['booked']:.3f}, predicted "
        f"{found['predicted']:.2f}; {found['drafted_per_token']:.2f} drafted per token, "
        f"{found['accepted']:.0%} accepted",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--configs", nargs="*", default=list(CONFIGS))
    parser.add_argument("--workloads", nargs="+", default=["edit", "question", "free"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--drafter", action="append", default=[], help="KIND=DIR: trained")
    parser.add_argument("--depth", type=int, help="a fixed depth in place of the controller")
    args = parser.parse_args()
    for kind, folder in (each.split("=", 1) for each in args.drafter):
        CONFIGS[kind] = {"method": kind, "model": folder}
        args.configs.append(kind)
    print(HEAD)
    for name in args.configs:
        config = CONFIGS[name]
        if config and args.depth:
            config = {**config, "num_speculative_tokens": args.depth}
        options = {"num_threads": args.threads, "seed": 1, "speculative_config": config}
        with Engine.open(args.model, **options) as engine:
            drafts = switched(engine)
            for workload in args.workloads:
                for batch in args.batches:
                    run(args, engine, drafts, name, workload, batch)


def run(
    args: argparse.Namespace,
    engine: Engine,
    drafts: Switching,
    name: str,
    workload: str,
    batch: int,
) -> None:
    repeats = max(1, args.repeats * (4 if batch == 1 else 1))
    prompts = prompts_of(workload, batch * (1 + repeats))
    found = compare(engine, drafts, prompts, sampling_of(workload, args.tokens), batch)
    show(name, workload, batch, found)
    if args.json:
        print(json.dumps({"config": name, "workload": workload, "batch": batch, **found}))


if __name__ == "__main__":
    main()
