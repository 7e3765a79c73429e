"""What a mask over the vocabulary costs a token: structured output, and the rules of bad words.

    python benchmarks/bench_masks.py [--models smollm2 demo] [--rounds 5] [--result OUT.json]

One thread, CPU time of the process, without a model's steps: a JSON object is written token by
token, and before each of them the logits of one row are masked as the engine does (`GuidanceMasks`,
`apply_edits` with ten words). Prints microseconds per token, medians over the rounds and their
range, and nanoseconds per entry of the vocabulary: the constants of
`ridgeline/plan/step_time/simulated.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from ridgeline import Engine, Sampling
from ridgeline.engine.sampling.logits_processors import apply_edits
from ridgeline.engine.scheduler.plan import SamplePoint, token_rules
from ridgeline.engine.structured_output.guidance import GuidanceMasks
from ridgeline.hub.download import ensure_downloaded
from ridgeline.records import OutputGrammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
OUTPUT = '{"name": "Ada of the long name", "age": 36, "city": "London by the Thames"}'
WORDS = (" color", " blue", " light", " number", " red", " sky", " prime", " green", " sun", " one")
COLUMNS = ["model", "vocabulary", "case", "µs per token", "ns per entry"]


def masked(engine: Engine, output: tuple[int, ...], size: int) -> float:
    """Seconds of CPU time to mask the logits before each token of the output."""
    masks = engine._masks
    assert isinstance(masks, GuidanceMasks)
    wanted = OutputGrammar("json", json.dumps(SCHEMA))
    masks.prepare(wanted)
    sampling = Sampling(temperature=0.0, max_tokens=len(output) + 1, structured=wanted)
    return _timed([_point(sampling, output[:n]) for n in range(len(output))], size, masks)


def ruled(engine: Engine, output: tuple[int, ...], size: int) -> float:
    """The same with the rules of ten words."""
    ids = tuple(tuple(engine.tokenizer.encode(word)) for word in WORDS)
    sampling = Sampling(temperature=0.0, max_tokens=99, bad_words=WORDS, bad_words_token_ids=ids)
    return _timed([_point(sampling, output[:n]) for n in range(len(output))], size, None)


def _point(sampling: Sampling, output: tuple[int, ...]) -> SamplePoint:
    return SamplePoint(
        sampling=sampling, seed=0, index=len(output), num_prompt=1, history=(0, *output)
    )


def _timed(points: list[SamplePoint], size: int, masks: GuidanceMasks | None) -> float:
    logits_1V = torch.randn((1, size))
    begun_s = time.process_time()
    for point in points:
        if masks is not None:
            masks.apply(logits_1V, [point])
        else:
            rules = token_rules(point.sampling, point.history[1:])
            completing = (*rules["completing"], 7)  # one is completed in every step
            apply_edits(logits_1V, [_with_completing(point, completing)])
    return time.process_time() - begun_s


def _with_completing(point: SamplePoint, tokens: tuple[int, ...]) -> SamplePoint:
    return SamplePoint(
        sampling=point.sampling,
        seed=0,
        index=point.index,
        num_prompt=1,
        history=point.history,
        completing=tokens,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2", "demo"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for model in args.models:
        ensure_downloaded(model)
        size = {"kv_cache_memory_bytes": 32 << 20, "max_model_len": 512, "num_threads": 1}
        with Engine.open(model, **size) as engine:
            output = tuple(engine.tokenizer.encode(OUTPUT))
            vocabulary = engine.resolved.spec.vocab_size
            for name, run in (("a JSON schema", masked), ("ten `bad_words`", ruled)):
                taken = [run(engine, output, vocabulary) for _ in range(args.rounds + 1)][1:]
                each_us = [round(1e6 * seconds / len(output), 1) for seconds in taken]
                median_us = statistics.median(each_us)
                shown = {"median": median_us, "runs": sorted(each_us)}
                rows.append(
                    [model, vocabulary, name, shown, round(1e3 * median_us / vocabulary, 2)]
                )
                print(*rows[-1], sep=" | ")
    if args.result:
        document = {
            "date": time.strftime("%Y-%m-%d"),
            "command": f"python benchmarks/bench_masks.py --rounds {args.rounds}",
            "columns": COLUMNS,
            "rows": rows,
        }
        args.result.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
