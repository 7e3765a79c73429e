"""What speculation gives on a large model with scripted acceptance: real cost, chosen luck.

    python benchmarks/bench_speculation_cost.py [--model dummy:llama-1b-32k]
        [--draft none|small|DIR] [--quantization int8] [--alphas 0.6 0.8 0.95] [--batches 1 8]
        [--tokens 48] [--rounds 2] [--threads 2]

Random weights have no text worth guessing, but their steps cost what trained ones cost. The plain
answers are recorded first; then drafts are the recorded answer with a share of 1 - alpha of its
tokens wrong (in random order, but as many runs of every length as alpha lets expect), and the real
controller decides on them, with the curve it measured: through real steps, verification and
rollback. `by the curve`: what alpha and the curve as it was measured at the start predict for the
best depth, before a step is taken. With --draft a real draft model makes its passes, and its tokens
are replaced; `small` is one of four layers and a quarter of the width, with random weights. Answers
with and without drafts take turns, and the columns are those of bench_speculation.py.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from bench_speculation import HEAD, Switching, compare, show
from safetensors.torch import save_file

from ridgeline import Engine, Sampling
from ridgeline.engine.scheduler.speculation.base import DraftContext, NoDrafts
from ridgeline.engine.speculate.depth_control.acceptance_rate import AcceptanceRates
from ridgeline.engine.speculate.depth_control.controller import DepthController
from ridgeline.engine.speculate.depth_control.lookup_accuracy import LookupAccuracy
from ridgeline.engine.speculate.depth_control.time_credit import TimeCredit
from ridgeline.engine.speculate.drafters.base import Drafter, LookupGuess, kind_of

KIND = kind_of(8)


class Script:
    """What will be said, by prompt, and how often a guess knows it."""

    def __init__(self) -> None:
        self._guesses: dict[tuple[int, ...], tuple[int, ...]] = {}

    def tell(self, answers: dict[tuple[int, ...], tuple[int, ...]], alpha: float) -> None:
        """Guesses of these answers, from now on."""
        rng = random.Random(7)
        self._guesses = {prompt: _worse(answer, alpha, rng) for prompt, answer in answers.items()}

    def guess(self, context: DraftContext, depth: int) -> tuple[int, ...]:
        done = len(context.tokens) - context.num_prompt
        return self._guesses[tuple(context.tokens[: context.num_prompt])][done : done + depth]


def _worse(answer: tuple[int, ...], alpha: float, rng: random.Random) -> tuple[int, ...]:
    """The answer with wrong tokens: right ones stand in runs of geometric length."""
    if not 0 < alpha < 1:
        return answer if alpha else tuple(token ^ 1 for token in answer)
    num = max(1, round(len(answer) * (1 - alpha)))
    runs = [int(math.log(1 - (i + 0.5) / num) / math.log(alpha)) for i in range(num)]
    rng.shuffle(runs)
    right = [place for run in runs for place in (*[True] * run, False)]
    right += [True] * (len(answer) - len(right))
    return tuple(token if r else token ^ 1 for token, r in zip(answer, right, strict=False))


class ScriptedLookup:
    name = "scripted"

    def __init__(self, script: Script) -> None:
        self._script = script

    def look(self, context: DraftContext, most: int) -> LookupGuess:
        tokens = self._script.guess(context, most)
        return LookupGuess(tokens, (KIND,) * len(tokens))

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        pass


class ScriptedDrafter:
    """A real drafter's time, the script's tokens."""

    name = "scripted"

    def __init__(self, script: Script, inner: Drafter) -> None:
        self._script, self._inner = script, inner

    def draft(
        self, contexts: Sequence[DraftContext], depths: Sequence[int]
    ) -> list[tuple[int, ...]]:
        self._inner.draft(contexts, depths)
        return [
            self._script.guess(o, d) if d else () for o, d in zip(contexts, depths, strict=True)
        ]

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self._inner.forget(seq_id, tokens, tenant)


def controller_of(engine: Engine) -> DepthController:
    found = engine._loop.scheduler.draft_scheduler._proposer
    assert isinstance(found, DepthController)
    return found


def prompts_of(batch: int, length: int, vocab: int) -> list[tuple[int, ...]]:
    rng = random.Random(batch)
    return [tuple(rng.randrange(10, vocab) for _ in range(length)) for _ in range(batch)]


def small_draft(shape: str, folder: Path) -> None:
    """A draft model for a dummy: a quarter of its width, four layers, weights of no meaning."""
    shapes = Path(__file__).parent.parent / "ridgeline/modelspec/families/shapes.toml"
    given = tomllib.loads(shapes.read_text())[shape.removeprefix("dummy:")]
    hidden, head = given["hidden_size"] // 4, 64
    heads, kv_heads, ffn = hidden // head, max(1, hidden // head // 4), 3 * hidden
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head}
    config = {name: value for name, value in given.items() if name != "source"}
    config |= sizes | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    outs = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv_heads * head, hidden),
    }
    outs |= {"self_attn.v_proj": (kv_heads * head, hidden), "self_attn.o_proj": (hidden, hidden)}
    outs |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)}
    outs |= {"mlp.down_proj": (hidden, ffn), "input_layernorm": (hidden,)}
    outs |= {"post_attention_layernorm": (hidden,)}
    named = {"model.embed_tokens": (given["vocab_size"], hidden), "model.norm": (hidden,)}
    named |= {f"model.layers.{i}.{name}": size for i in range(4) for name, size in outs.items()}
    weights = {f"{name}.weight": torch.randn(size) * 0.02 for name, size in named.items()}
    save_file({n: t.bfloat16() for n, t in weights.items()}, folder / "model.safetensors")


def best_gain(controller: DepthController, batch: int, alpha: float) -> str:
    """What alpha and the curve predict for the best depth, and the price of a draft token there."""
    cost, draft_cost = controller.costs
    plain_s = cost.seconds(batch, batch)

    def gain(depth: int) -> tuple[float, int]:
        drafting_s = 0.0 if draft_cost is None else draft_cost.seconds(batch, depth)
        took_s = cost.seconds(batch, batch * (depth + 1)) + drafting_s
        return sum(alpha**i for i in range(depth + 1)) * plain_s / took_s, depth

    best, depth = max(gain(depth) for depth in range(1, 17))
    price = 0.0 if draft_cost is None else draft_cost.seconds(batch, depth) / depth / plain_s
    return f"by the curve {best:.2f} with {depth} drafts, each {price:.3f} of a plain step"


def show_curve(controller: DepthController) -> None:
    cost, draft_cost = controller.costs
    for runs in (1, 8):
        one = cost.seconds(runs, runs)
        ratios = [(k, cost.seconds(runs, runs * (k + 1)) / one) for k in (1, 2, 3, 4, 6, 8, 16)]
        text = "  ".join(f"K={k} {ratio:.2f}" for k, ratio in ratios)
        print(f"T({runs} sequences) = {one * 1e3:.1f} ms; with K drafts each: {text}")
    if draft_cost is not None:
        text = "  ".join(f"K={k} {draft_cost.seconds(1, k) * 1e3:.1f}" for k in (1, 4))
        print(f"drafting for one sequence, ms: {text}")


def measure(
    args: argparse.Namespace,
    engine: Engine,
    controller: DepthController,
    script: Script,
    batch: int,
) -> None:
    prompts = prompts_of(batch, args.context, engine.resolved.spec.vocab_size)
    sampling = Sampling(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    drafting = engine._loop.scheduler.draft_scheduler
    drafting._proposer = NoDrafts()
    found = engine.generate(prompts, sampling)
    drafting._proposer = drafts = Switching(controller, engine, batch, time.perf_counter)
    answers = {p: each.tokens for p, each in zip(prompts, found, strict=True)}
    for alpha in args.alphas:
        script.tell(answers, alpha)
        text = best_gain(controller, batch, alpha)
        controller.acceptance, controller.shadows = AcceptanceRates(), LookupAccuracy()
        controller.account = TimeCredit()  # only one sort of drafts is scripted
        result = compare(engine, drafts, [prompts] * (1 + args.rounds), sampling)
        show("scripted", f"alpha {alpha:.2f}", batch, result)
        print(f"{text:>60}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="dummy:llama-1b-32k")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--alphas", nargs="+", type=float, default=[0.0, 0.6, 0.8, 0.95])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    quantization = None if args.quantization == "none" else args.quantization
    config: dict[str, Any] = {"method": "ngram"}
    stack = ExitStack()
    if args.draft == "small":
        args.draft = stack.enter_context(tempfile.TemporaryDirectory())
        small_draft(args.model, Path(args.draft))
    if args.draft != "none":
        config = {"method": "draft_model", "model": args.draft, "quantization": quantization}
    options = {
        "num_threads": args.threads,
        "max_num_seqs": max(args.batches),
        "max_model_len": args.context + args.tokens + 32,
        "quantization": quantization,
        "speculative_config": {k: v for k, v in config.items() if v is not None},
    }
    with stack, Engine.open(args.model, **options) as engine:
        controller, script = controller_of(engine), Script()
        if controller._drafter is None:
            controller._lookup = ScriptedLookup(script)
        else:
            controller._drafter = ScriptedDrafter(script, controller._drafter)
        show_curve(controller)
        print(HEAD)
        for batch in args.batches:
            measure(args, engine, controller, script, batch)


if __name__ == "__main__":
    main()
