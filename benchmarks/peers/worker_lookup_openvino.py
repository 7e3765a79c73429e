"""OpenVINO GenAI with and without prompt lookup: `python worker_lookup_openvino.py GGUF THREADS`.

One JSON line in, one out: {"prompt": ids, "tokens": 96, "mode": "plain" or "lookup"} gives the ids
of the answer and the seconds from its first token to its last, by OpenVINO's own account. With
"-f32" behind the mode it multiplies float32; left to itself it takes bfloat16 where the CPU has it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

DRAFTS, GRAM = 5, 3  # as its documentation recommends


def config_of(order: dict[str, Any]) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = order["tokens"], True
    config.do_sample = False
    if order["mode"].startswith("lookup"):
        config.num_assistant_tokens, config.max_ngram_size = DRAFTS, GRAM
    return config


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    path, threads = sys.argv[1], int(sys.argv[2])
    options = {"INFERENCE_NUM_THREADS": threads}
    exact = {**options, "INFERENCE_PRECISION_HINT": "f32"}
    pipes = {
        "plain": genai.LLMPipeline(path, "CPU", **options),
        "lookup": genai.LLMPipeline(path, "CPU", prompt_lookup=True, **options),
        "plain-f32": genai.LLMPipeline(path, "CPU", **exact),
        "lookup-f32": genai.LLMPipeline(path, "CPU", prompt_lookup=True, **exact),
    }
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        ids = ov.Tensor(np.array([order["prompt"]], dtype=np.int64))
        found = pipes[order["mode"]].generate(ids, config_of(order))
        took = found.perf_metrics
        after_ms = took.get_generate_duration().mean - took.get_ttft().mean
        answer = {"tokens": list(map(int, found.tokens[0])), "seconds": after_ms / 1e3}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
