"""Speculation against plain decoding: the gain per drafter and workload, and that it never loses.

    python benchmarks/bench_speculation.py [--configs none ngram draft] [--batches 1 8 32]
        [--workloads edit question free] [--tokens 96] [--rounds 4] [--seconds 12] [--model demo]
        [--quantization int8] [--drafter medusa=DIR] [--clock cpu]

In every round one engine answers the same prompts twice, once with drafts and once without, in
alternating order, so that whatever else happens on the machine happens to both. Timed are the steps
in which all slots are taken and no prompt is computed: twice as many prompts as slots are sent at
once, with one slot a single one. The ratio of tokens per second is that of all rounds together, its
error comes from resampling rounds (5 to 95 %), and the median is that of the rounds' ratios: the
better number where every round gains alike and the machine's pace changes from round to round.
`none` does the same without a drafter: what the noise is. With `--turn 7` each prompt is answered
once and drafts are on and off for seven steps at a time: the pace of a busy machine then hardly
comes in, which tells what speculation costs where it has nothing to say. With `--clock cpu` both
are timed by the engine thread's processor time (of one thread), which other work on the machine
disturbs less, and the controller decides by it too.

Workloads: `edit` (source is to be repeated with a change: much of the answer is in the prompt),
`rename` (likewise, with a name renamed),
`question` (a document, then a question on it), `chat` (held-out user messages in the model's chat
template), `talk` (likewise, sampled at 1 without a seed, so that drafts are judged by rejection
sampling), `free` (held-out text goes on, sampled at 0.8 with a seed: little repeats). The others
are decoded greedily. Prompts are cut from the held-out texts that ship with Ridgeline and
differ from sequence to sequence. `booked` and `predicted` are the controller's own account of the
same steps: the gain that it saw, and that it expected.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from importlib.resources import files
from typing import Any, NamedTuple

from ridgeline import Engine, Sampling
from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.scheduler.speculation.base import (
    DraftContext,
    DraftOutcome,
    DraftProposer,
    StepCapacity,
)
from ridgeline.engine.speculate.build import measure_drafts, measure_steps
from ridgeline.engine.speculate.depth_control.controller import DepthController
from ridgeline.engine.speculate.depth_control.step_cost import DraftCost, StepTimeCurve

Clock = Callable[[], float]

CONFIGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "lookahead": {"method": "lookahead"},
    "draft": {"method": "draft_model", "model": "demo-draft"},
    "self": {"method": "self"},
    "auto": {"method": "auto", "model": "demo-draft"},
}
NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]{3,}")
HELDOUT = files("ridgeline") / "assets" / "heldout"
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.thread_time}


class Timed(NamedTuple):
    """Steps with all slots taken and no prompts: seconds, tokens, what the controller booked and
    what it had predicted to save (s), drafts and those accepted."""

    seconds: float = 0.0
    tokens: float = 0.0
    saved_s: float = 0.0
    predicted_s: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0

    def __add__(self, other: tuple[float, ...]) -> Timed:  # type: ignore[override]
        return Timed(*(a + b for a, b in zip(self, other, strict=True)))

    def since(self, before: Timed) -> Timed:
        return Timed(*(a - b for a, b in zip(self, before, strict=True)))


class Switching:
    """Drafts where `drafts` is set; times the steps either way."""

    def __init__(self, inner: DraftProposer, engine: Engine, batch: int, clock: Clock) -> None:
        self._inner, self._scheduler = inner, engine._loop.scheduler
        self._batch, self._clock, self.drafts = batch, clock, True
        self._turn = self._num_steps = 0
        self.begin(True)

    def begin(self, drafts: bool, turn: int = 0) -> None:
        """Answer the round's prompts with or without drafts; or alternate every `turn` steps."""
        self.drafts, self._turn = drafts, turn
        self.found = {True: Timed(), False: Timed()}
        self._last: tuple[Timed, bool] | None = None

    def should_propose(self, runs: Sequence[Run]) -> bool:
        """Called once per step, while it is planned."""
        self._note(runs)
        self._num_steps += 1
        if self._turn:
            self.drafts = self._num_steps // self._turn % 2 == 0
        return self.drafts and self._inner.should_propose(runs)

    def _note(self, runs: Sequence[Run]) -> None:
        """The step that has just ended, if it is one that is timed; `runs` of the next."""
        totals, drafting = self._scheduler.totals, self._scheduler.draft_scheduler.totals
        own = self._inner.counters()
        saved_s = own.get("speculation_saved_s", 0.0) - own.get("speculation_lost_s", 0.0)
        predicted_s = own.get("speculation_predicted_s", 0.0)
        drafted, accepted = drafting.num_tokens, drafting.num_accepted
        now = Timed(self._clock(), totals.num_sampled, saved_s, predicted_s, drafted, accepted)
        full = len(self._scheduler._registry.running) == self._batch
        if self._last is not None and full:
            before, was_decode = self._last
            if was_decode:
                self.found[self.drafts] += now.since(before)
        decodes = len(runs) == self._batch and all(len(run.tokens) == 1 for run in runs)
        self._last = now, full and decodes

    def propose(
        self, contexts: Sequence[DraftContext], room: StepCapacity
    ) -> list[tuple[int, ...]]:
        return self._inner.propose(contexts, room)

    def alternatives(self, seq_id: int) -> Sequence[tuple[int, ...]]:
        return self._inner.alternatives(seq_id)

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        self._inner.observe(outcomes)

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        """Answers without drafts are not remembered, because the prompt is repeated."""
        self._inner.forget(seq_id, tokens if self.drafts else (), tenant)

    def counters(self) -> dict[str, float]:
        return self._inner.counters()


def switched(engine: Engine, batch: int, clock: Clock) -> Switching:
    """The engine's drafts, which can be switched off."""
    drafting = engine._loop.scheduler.draft_scheduler
    drafting._proposer = found = Switching(drafting._proposer, engine, batch, clock)
    return found


def texts(name: str, size: int, count: int) -> list[str]:
    """`count` different pieces of a held-out text."""
    whole = (HELDOUT / name).read_text(encoding="utf-8")
    step = max(1, (len(whole) - size) // max(1, count))
    return [whole[i * step : i * step + size] for i in range(count)]


def chats(engine: Engine, count: int) -> list[list[int]]:
    """`count` held-out user messages as the model's chat template puts them."""
    lines = (HELDOUT / "chat.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    firsts = [json.loads(line)["messages"][0] for line in lines]
    return [list(engine.tokenizer.apply_chat_template([message])) for message in firsts]


def prompts_of(workload: str, count: int) -> list[str]:
    if workload == "edit":
        pieces = texts("code.txt", 500, count)
        return [f"{piece}\n\n# The same again:\n{piece[:160]}" for piece in pieces]
    if workload == "rename":
        asked = [(piece, *renamed(piece, "changed")) for piece in texts("code.txt", 500, count)]
        return [f"{piece}{heading}{again[:160]}" for piece, heading, again in asked]
    if workload == "question":
        return [f"{piece}\n\nIn short: {piece[:40]}" for piece in texts("docs.txt", 700, count)]
    return texts("code.txt", 300, count)


def renamed(piece: str, new: str) -> tuple[str, str]:
    """A heading that asks for it, and the piece with its most frequent name called `new`."""
    names = Counter(NAME.findall(piece))
    old = names.most_common(1)[0][0] if names else "x"
    return f"\n\n# The same, {old} renamed to {new}:\n", re.sub(rf"\b{old}\b", new, piece)


def sampling_of(workload: str, tokens: int) -> Sampling:
    if workload == "talk":
        return Sampling(temperature=1.0, max_tokens=tokens, ignore_eos=True)
    if workload == "free":
        return Sampling(temperature=0.8, seed=1, max_tokens=tokens, ignore_eos=True)
    return Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)


Round = tuple[Timed, Timed]
"""With drafts, without."""


def gain(rounds: Sequence[Round]) -> float:
    """Speed with drafts over speed without."""
    with_, without = (reduce(Timed.__add__, each) for each in zip(*rounds, strict=True))
    if not (with_.tokens and without.tokens):
        raise SystemExit("no step with all slots taken: more --tokens or --rounds")
    return with_.tokens / with_.seconds * without.seconds / without.tokens


def spread(rounds: Sequence[Round]) -> tuple[float, float]:
    """5 and 95 % of what resampled rounds give."""
    rng = random.Random(3)
    found = sorted(gain(rng.choices(rounds, k=len(rounds))) for _ in range(300))
    return found[15], found[285]


def compare(
    engine: Engine,
    drafts: Switching,
    asked: Sequence[Sequence[Any]],
    sampling: Sampling,
    most_s: float = math.inf,
    turn: int = 0,
) -> dict[str, float]:
    """Each entry of `asked` with drafts and without; the first is not timed. After `most_s` seconds
    the rest is left out."""
    rounds: list[Round] = []
    begun_s = time.perf_counter()
    for i, prompts in enumerate(asked):
        if len(rounds) > 1 and time.perf_counter() - begun_s > most_s:
            break
        found = {}
        for with_drafts in [True] if turn else (i % 2 == 0, i % 2 == 1):
            drafts.begin(with_drafts, turn)
            engine.generate(prompts, sampling)
            found |= drafts.found if turn else {with_drafts: drafts.found[with_drafts]}
        rounds += [(found[True], found[False])] * (i > 0)
    drafts.begin(True)
    own, plain = (reduce(Timed.__add__, each) for each in zip(*rounds, strict=True))
    low, high = spread(rounds)
    plain_s = own.seconds + own.saved_s
    return {
        "rounds": len(rounds),
        "plain_tok_s": plain.tokens / plain.seconds,
        "ratio": gain(rounds),
        "median": statistics.median(gain([each]) for each in rounds),
        "low": low,
        "high": high,
        "booked": plain_s / own.seconds,
        "predicted": plain_s / (plain_s - own.predicted_s),
        "drafted_per_token": own.drafted / own.tokens,
        "accepted": own.accepted / own.drafted if own.drafted else 0.0,
    }


HEAD = f"{'config':10}{'workload':12}{'batch':>6}{'plain tok/s':>13}{'ratio':>8}  5..95 %"


def show(name: str, workload: str, batch: int, found: dict[str, float]) -> None:
    print(
        f"{name:10}{workload:12}{batch:6}{found['plain_tok_s']:13.0f}{found['ratio']:8.3f}  "
        f"{found['low']:.2f}..{found['high']:.2f}  median {found['median']:.3f}, booked "
        f"{found['booked']:.3f}, predicted {found['predicted']:.2f}; "
        f"{found['drafted_per_token']:.2f} drafted per token, {found['accepted']:.0%} accepted, "
        f"{1 / (1 - found['accepted'] * found['drafted_per_token']):.3f} tokens per step, "
        f"{found['rounds']:.0f} rounds",
        flush=True,
    )


def by_clock(engine: Engine, clock: Clock) -> None:
    """The controller measures and decides by another clock."""
    controller = engine._loop.scheduler.draft_scheduler._proposer
    if not isinstance(controller, DepthController) or clock is time.perf_counter:
        return
    loop, resolved, drafter = engine._loop, engine.resolved, controller._drafter
    controller.use_clock(clock)

    def measured() -> None:
        steps = StepTimeCurve(measure_steps(loop.runner, resolved, clock))
        states = getattr(drafter, "_states", None)
        drafts = drafter and DraftCost(measure_drafts(drafter, resolved, clock, states))
        controller.calibrate(steps, drafts)

    loop.call(measured).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--configs", nargs="*", default=list(CONFIGS))
    parser.add_argument("--workloads", nargs="+", default=["edit", "question", "free"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=math.inf, help="per line, at most")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument(
        "--turn", type=int, default=0, help="steps between switching drafts on and off"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--draft-model", help="of draft and auto; for demo, demo-draft")
    parser.add_argument("--drafter", action="append", default=[], help="KIND=DIR: trained")
    parser.add_argument("--tree", help="a fixed tree in place of chains (medusa)")
    parser.add_argument("--rejection-sample-method", choices=["block", "standard"])
    parser.add_argument("--depth", type=int, help="a fixed depth in place of the controller")
    args = parser.parse_args()
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu reads the time of one thread")
    if args.model != "demo" or args.draft_model:
        if "draft" in args.configs and not args.draft_model:
            parser.error(f"draft: no --draft-model for {args.model}")
        named = {"model": args.draft_model} if args.draft_model else {}
        CONFIGS["draft"] = {"method": "draft_model", **named}
        CONFIGS["auto"] = {"method": "auto", **named}
    for kind, folder in (each.split("=", 1) for each in args.drafter):
        CONFIGS[kind] = {"method": kind, "model": folder}
        args.configs.append(kind)
    print(HEAD)
    for name in args.configs:
        for batch in args.batches:
            run(args, name, batch)


def run(args: argparse.Namespace, name: str, batch: int) -> None:
    config = CONFIGS[name]
    if config and args.depth:
        config = {**config, "num_speculative_tokens": args.depth}
    if config and args.tree:
        config = {**config, "speculative_token_tree": args.tree}
    if config and args.rejection_sample_method:
        config = {**config, "rejection_sample_method": args.rejection_sample_method}
    options = {
        "num_threads": args.threads,
        "seed": 1,
        "max_num_seqs": batch,
        "enable_prefix_caching": False,
        "quantization": args.quantization,
        "speculative_config": config,
    }
    with Engine.open(args.model, **options) as engine:
        clock = CLOCKS[args.clock]
        by_clock(engine, clock)
        drafts, each = switched(engine, batch, clock), 2 * batch if batch > 1 else 1
        for workload in args.workloads:
            count = each * (1 + args.rounds)
            prompts: Sequence[Any] = prompts_of(workload, count)
            if workload in ("chat", "talk"):
                prompts = chats(engine, count)
            asked = [prompts[i : i + each] for i in range(0, len(prompts), each)]
            sampling = sampling_of(workload, args.tokens)
            found = compare(engine, drafts, asked, sampling, args.seconds, args.turn)
            show(name, workload, batch, found)
            if args.json:
                print(json.dumps({"config": name, "workload": workload, "batch": batch, **found}))


if __name__ == "__main__":
    main()
