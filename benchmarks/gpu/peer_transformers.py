"""transformers' `generate` on this GPU, for a model of the same shape with random BF16 weights.

    python benchmarks/gpu/peer_transformers.py [--model dummy:llama-3.1-8b] [--sequences 1,32]
        [--context 512] [--tokens 33] [--prompt 2048] [--json FILE]

A decode step is the difference between generating `--tokens` and one token, over their number.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.model import ModelSpec


def make_model(spec: ModelSpec, context: int) -> LlamaForCausalLM:
    """A Llama of the spec's shape on the GPU."""
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=mlp.gate.num_out,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=spec.tied_embeddings,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def seconds(model: LlamaForCausalLM, ids: torch.Tensor, tokens: int, times: int = 2) -> float:
    """Median seconds of generating exactly `tokens` tokens."""
    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="dummy:llama-3.1-8b")
    parser.add_argument("--sequences", default="1,32")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    spec = load_spec(asked.model)
    lines: list[dict[str, object]] = []
    with torch.inference_mode():
        model = make_model(spec, asked.context + asked.prompt + asked.tokens)
        for count in map(int, asked.sequences.split(",")):
            ids = torch.randint(3, spec.vocab_size, (count, asked.context), device="cuda")
            seconds(model, ids, 2, 1)
            whole_s, first_s = seconds(model, ids, asked.tokens), seconds(model, ids, 1)
            step_s = (whole_s - first_s) / (asked.tokens - 1)
            lines.append(
                {
                    "phase": "decode",
                    "sequences": count,
                    "context": asked.context,
                    "wall_ms": round(1e3 * step_s, 3),
                    "tok_s": round(count / step_s, 1),
                }
            )
            print(lines[-1], flush=True)
        ids = torch.randint(3, spec.vocab_size, (1, asked.prompt), device="cuda")
        seconds(model, ids, 1, 1)
        prefill_s = seconds(model, ids, 1, 4)
        lines.append(
            {
                "phase": "prefill",
                "tokens": asked.prompt,
                "wall_ms": round(1e3 * prefill_s, 3),
                "tok_s": round(asked.prompt / prefill_s, 1),
            }
        )
        print(lines[-1], flush=True)
    record = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": asked.model,
        "lines": lines,
    }
    if asked.json is not None:
        asked.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
