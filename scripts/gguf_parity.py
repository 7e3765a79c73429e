"""Compares a GGUF file in Ridgeline with llama.cpp: token ids, greedy answers, likelihood of texts.

`--peer` starts Python in an environment that has llama-cpp-python. With `--float32 FILE`, llama.cpp
runs the model converted to float32 (written to FILE), so that neither side rounds activations;
otherwise it rounds them to 8 bits, as it always does with quantised weights.

    python -m scripts.gguf_parity MODEL.gguf --peer ENV/bin/python --result OUT.json
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import ridgeline
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.workflows.evaluate.heldout_text import heldout_texts
from scripts.odd_strings import odd_strings

TOPICS = (
    "the sea", "a prime number", "photosynthesis", "the city of Rome", "a for loop in Python",
    "how to boil an egg", "gravity", "the French Revolution", "a friendly dragon", "sleep",
    "the number 7", "recycling", "chess", "a haiku", "black holes", "tea", "honesty", "rain",
    "bicycles", "the human heart", "a sorting algorithm", "volcanoes", "bread", "the moon", "music",
)  # fmt: skip
FORMS = (
    "Explain {} in one sentence.", "Write two lines about {}.", "What is interesting about {}?",
    "Give me three words that describe {}.", "{}", "Tell a child about {}, please!",
    "List: 1) {} 2)", "Translate to French: I like {}.",
)  # fmt: skip
NEAR_TIE = 0.1
CLEAR = 0.02  # 500 times the largest difference in float32


def questions(count: int) -> list[str]:
    return [form.format(topic) for topic in TOPICS for form in FORMS][:count]


def ask_peer(peer: str, request: dict[str, Any]) -> dict[str, Any]:
    oracle = Path(__file__).with_name("llama_cpp_oracle.py")
    answer: dict[str, Any] = json.loads(
        subprocess.run(
            [peer, str(oracle)], input=json.dumps(request), stdout=subprocess.PIPE, text=True,
            check=True,
        ).stdout
    )  # fmt: skip
    return answer


def prompts_of(tokenizer: Any, count: int) -> list[list[int]]:
    out = []
    for question in questions(count):
        try:
            chat = [{"role": "user", "content": question}]
            out.append(tokenizer.apply_chat_template(chat))
        except ridgeline.errors.BadInput:  # a base model
            out.append(tokenizer.encode(question))
    return out


def windows_of(tokenizer: Any, each: int, length: int) -> list[list[int]]:
    """Windows of the held-out texts, each with the tokenizer's beginning of text."""
    first = tokenizer.encode("")
    out = []
    for text in heldout_texts().values():
        tokens = tokenizer.encode(text[:40_000], add_special_tokens=False)
        out += [first + tokens[i * length : (i + 1) * length] for i in range(each)]
    return out


def compare_answers(
    prompts: list[list[int]], theirs: list[dict[str, Any]], engine: Any
) -> dict[str, Any]:
    """Up to the first token that differs: how many answers are equal, and how far the rest is."""
    count = max(len(their["tokens"]) for their in theirs)
    sampling = ridgeline.Sampling(max_tokens=count, temperature=0.0, logprobs=1)
    ours = engine.generate(prompts, sampling)
    equal, ties, others, distance = 0, [], [], []
    for index, (found, truth) in enumerate(zip(ours, theirs, strict=True)):
        choice = found.answers[0]
        tokens = list(choice.tokens)
        at = next(
            (i for i, (a, b) in enumerate(zip(tokens, truth["tokens"], strict=False)) if a != b),
            None,
        )
        same = len(truth["tokens"]) if at is None else at
        pairs = zip(choice.logprobs[:same], truth["logprobs"], strict=False)
        distance += [abs(one.logprob - other) for one, other in pairs]
        if at is None:
            equal += 1
            continue
        gap = truth["gaps"][at]
        (ties if gap < NEAR_TIE else others).append((index, at, round(gap, 4)))
        print(f"prompt {index}, token {at}: {tokens[at]} for {truth['tokens'][at]}, gap {gap:.4f}")
    return {
        "prompts": len(prompts),
        "equal answers": equal,
        "near ties": ties,
        "other differences": others,
        "logprob difference, mean": float(np.mean(distance)),
        "logprob difference, largest": float(np.max(distance)),
    }


def perplexity(losses: list[float], windows: list[list[int]]) -> float:
    return math.exp(sum(losses) / sum(len(window) - 1 for window in windows))


def loss_of(engine: Any, window: list[int]) -> float:
    rows = engine.logprobs_of(window[:-1])
    return float(-rows[np.arange(len(window) - 1), window[1:]].sum(dtype=np.float64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--peer", required=True, help="Python with llama-cpp-python")
    parser.add_argument("--float32", help="convert to this float32 file for llama.cpp")
    parser.add_argument("--activations", nargs="+", default=["float32", "int8"])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--windows", type=int, default=8, help="of each held-out text")
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--vectors", type=Path, help="freeze 30 prompts for the tests")
    chosen = parser.parse_args()
    tokenizer, texts = load_tokenizer(chosen.model), odd_strings(2000)
    prompts = prompts_of(tokenizer, chosen.prompts)
    windows = windows_of(tokenizer, chosen.windows, chosen.length)
    theirs = ask_peer(
        chosen.peer,
        {
            "model": chosen.model, "to_float32": chosen.float32, "texts": texts, "prompts": prompts,
            "count": chosen.tokens, "windows": windows,
        },
    )  # fmt: skip
    wrong = [
        t for t, ids in zip(texts, theirs["tokens"], strict=True) if tokenizer.encode(t) != ids
    ]
    result: dict[str, Any] = {
        "model": Path(chosen.model).name,
        "llama.cpp activations": "float32" if chosen.float32 else "8 bits",
        "texts": len(texts),
        "texts of other ids": len(wrong),
        "ends are equal": sorted(load_spec(chosen.model).eos_token_ids) == theirs["ends"],
        "llama.cpp perplexity": perplexity(theirs["losses"], windows),
    }
    for activations in chosen.activations:
        with ridgeline.Engine.open(
            chosen.model, activations=activations, dtype="float32", max_model_len=1024
        ) as engine:
            found = compare_answers(prompts, theirs["greedy"], engine)
            found["perplexity"] = perplexity([loss_of(engine, w) for w in windows], windows)
        result[f"ridgeline, {activations} activations"] = found
        print(json.dumps(result, indent=1))
        if chosen.result:
            chosen.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if chosen.vectors:
        freeze(chosen.vectors, texts, theirs, prompts)


def freeze(path: Path, texts: list[str], theirs: dict[str, Any], prompts: list[list[int]]) -> None:
    """Thirty texts, and thirty prompts of whose answers no token is nearly a tie."""
    clear = [
        (prompt, answer["tokens"])
        for prompt, answer in zip(prompts, theirs["greedy"], strict=True)
        if min(answer["gaps"]) > CLEAR
    ][:30]
    document = {
        "texts": texts[6:36], "tokens": theirs["tokens"][6:36], "ends": theirs["ends"],
        "prompts": [prompt for prompt, _ in clear], "answers": [answer for _, answer in clear],
    }  # fmt: skip
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
