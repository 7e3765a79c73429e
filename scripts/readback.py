"""Are the quantised files that Ridgeline writes read by their own libraries as the same model?

    python scripts/readback.py make FOLDER              here: writes every format, and what the
                                                        engine says with the weights they mean
    python scripts/readback.py llama FOLDER             where llama-cpp-python is installed
    python scripts/readback.py transformers FOLDER      where transformers, compressed-tensors and
                                                        bitsandbytes are installed
    python scripts/readback.py gptqmodel FOLDER         where GPTQModel is: GPTQ and AWQ

`make` continues token ids greedily, in float32 with the weights that each file decodes to, and
keeps the gap between the two best logits of every step. The libraries continue the same ids twice:
by themselves, and one token at a time on ours. Where they compute in float32 too, every step must
agree; llama.cpp and W8A8 round activations to 8 bits, so that a step whose gap is below `TIE` may
go either way there. `make check-readback` makes the environments and runs all of them, and
`readback_vllm.py`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORMATS: dict[str, dict[str, Any]] = {
    "gguf-q4_0": {"format": "gguf", "group_size": 32},
    "gguf-q4_1": {"format": "gguf", "group_size": 32, "zeros": True},
    "gguf-q5_0": {"format": "gguf", "bits": 5, "group_size": 32},
    "gguf-q8_0": {"format": "gguf", "bits": 8},
    "gguf-q4_k": {"format": "gguf", "numbers": "q4_k"},
    "gguf-q6_k": {"format": "gguf", "numbers": "q6_k"},
    "gguf-mixtral": {"model": "mixtral", "format": "gguf", "bits": 8},
    "gguf-mixtral-q4_0": {"model": "mixtral", "format": "gguf", "group_size": 32},
    "gguf-qwen3moe": {"model": "qwen3_moe", "format": "gguf", "bits": 8},
    "ct-int4": {"format": "compressed-tensors", "group_size": 32},
    "ct-int4-zeros": {"format": "compressed-tensors", "group_size": 64, "zeros": True},
    "ct-int3": {"format": "compressed-tensors", "bits": 3, "group_size": 32},
    "ct-int8": {"format": "compressed-tensors", "bits": 8},
    "ct-fp8-tensor": {"format": "compressed-tensors", "numbers": "fp8-tensor"},
    "ct-fp8-channel": {"format": "compressed-tensors", "numbers": "fp8-channel"},
    "fp8-block": {"model": "llama", "format": "fp8", "numbers": "fp8-block"},
    "bnb-nf4": {"format": "bitsandbytes", "numbers": "nf4"},
    "bnb-int8": {"format": "bitsandbytes", "bits": 8},
    "gptq-int4": {"format": "gptq", "group_size": 32},
    "gptq-int4-zeros": {"format": "gptq", "group_size": 64, "zeros": True},
    "gptq-int3": {"format": "gptq", "bits": 3, "group_size": 32},
    "gptq-int8": {"format": "gptq", "bits": 8},
    "awq-int4": {"format": "awq", "group_size": 32},
    "awq-int4-zeros": {"format": "awq", "group_size": 64, "zeros": True},
}
PROMPTS = (
    "def read_file(path):\n    ",
    "The function returns a list of",
    "import os\nimport sys\n\n\nclass ",
    "If the argument is None, then",
    "for name, value in sorted(",
    "A string is a sequence of",
    "    try:\n        return self.",
    "This module provides",
)
STEPS = 32
TIE = 0.25
"""Gap of logits that 8-bit activations may turn over."""
ROUTE = 1.0
"""The same where they may also send a token to another expert."""
TIES = {"ct-int8": TIE, "bnb-int8": TIE, "bnb-nf4": 0.05, "awq-int4": 0.05, "awq-int4-zeros": 0.05}
"""W8A8 has 8-bit activations; NF4 is decoded to the model's bfloat16; AWQ multiplies in float16."""

MOE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "head_dim": 32,
    },
}
WHOLE = {"llama": {"hidden_size": 256, "intermediate_size": 512}}
"""Every size a multiple of 128: transformers decodes FP8 in whole blocks alone."""


def random_experts(folder: Path, family: str) -> str:
    """A small mixture of experts (or plain model) with random weights and the demo model's
    tokenizer."""
    import torch
    from safetensors.torch import save_file

    from ridgeline.engine.checkpoints.family_layouts import LAYOUTS
    from ridgeline.engine.checkpoints.tensor_names import locate, parts, row_sizes
    from ridgeline.modelspec.checkpoints.load import load_spec
    from ridgeline.modelspec.checkpoints.locate import model_path

    config = {
        "model_type": family,
        "vocab_size": 4096,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "dtype": "float32",
        **(MOE | WHOLE)[family],
    }
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model_path("demo"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec, generator = load_spec(str(folder)), torch.Generator().manual_seed(7)
    tensors = {}
    for part in parts(spec):
        sizes = {} if part.layer is None else row_sizes(spec.layers[part.layer])
        value = torch.randn(part.shape, generator=generator)
        value = 1 + 0.3 * value if len(part.shape) == 1 else value * (1.5 / part.shape[-1] ** 0.5)
        tensors[locate(part, LAYOUTS[family][0], sizes).name] = value
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def make(folder: Path) -> int:
    """Write every format and `expected.json`."""
    from ridgeline.config.improve import QuantizeOptions
    from ridgeline.workflows.quantize.quantize import quantize

    models = {"demo": "demo"} | {
        family: random_experts(folder / f"random-{family}", family) for family in (*MOE, *WHOLE)
    }
    for name, choices in FORMATS.items():
        shutil.rmtree(folder / name, ignore_errors=True)  # written by the code as it is now
        model = models[choices.get("model", "demo")]
        quantize(
            model,
            folder / name,
            QuantizeOptions(
                method="rtn",
                **{key: value for key, value in choices.items() if key != "model"},
            ),
        )
    found = {name: _expected(_path(folder, name)) for name in FORMATS}
    (folder / "expected.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


def _path(folder: Path, name: str) -> str:
    return str(folder / name / "model.gguf" if name.startswith("gguf") else folder / name)


def _expected(model: str) -> list[dict[str, Any]]:
    import torch

    from ridgeline.engine.checkpoints.load import load_decoder
    from ridgeline.engine.execution.runner import TorchRunner
    from ridgeline.engine.tokenization import load_tokenizer
    from ridgeline.modelspec.checkpoints.load import load_spec
    from ridgeline.modelspec.format import dense
    from ridgeline.modelspec.model import LinearSpec
    from ridgeline.modelspec.rewrite import map_linears, with_dtype

    def plain(path: str, linear: LinearSpec) -> LinearSpec:
        return LinearSpec(
            num_out=linear.num_out,
            num_in=linear.num_in,
            bias=linear.bias,
            format=dense("float32"),
        )

    spec = map_linears(with_dtype(load_spec(model), "float32"), plain)
    decoder = load_decoder(model, spec, device="cpu", compute_dtype=torch.float32)
    runner, tokenizer = TorchRunner(decoder, None, None), load_tokenizer(model)  # type: ignore[arg-type]
    rows = []
    for prompt in PROMPTS:
        ids = list(tokenizer.encode(prompt))
        length, gaps = len(ids), []
        for _ in range(STEPS):
            best = runner.logits(ids)[-1].topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
        text = tokenizer.decode(ids[length:])
        rows.append(
            {"prompt": prompt, "ids": ids[:length], "out": ids[length:], "gaps": gaps, "text": text}
        )
    return rows


class Verdict:
    """Counts over the prompts of one format."""

    def __init__(self, name: str) -> None:
        self.name, self.whole, self.bad = name, 0, list[str]()
        self.steps = self.agreed = 0

    def add(self, row: dict[str, Any], out: list[int], forced: list[int], tie: float) -> None:
        """`out`: the library's own continuation; `forced`: its choice at each step on our ids."""
        self.whole += out == row["out"]
        for step, (ours, theirs) in enumerate(zip(row["out"], forced, strict=True)):
            self.steps += 1
            self.agreed += ours == theirs
            if ours != theirs and row["gaps"][step] >= tie:
                self.bad.append(f"{row['prompt']!r} step {step}: gap {row['gaps'][step]:.3f}")

    def tell(self) -> bool:
        """Print it; did it hold?"""
        print(
            f"{self.name:16} same text {self.whole} of {len(PROMPTS)}, same token "
            f"{self.agreed} of {self.steps} steps, beyond a tie {len(self.bad)}",
            flush=True,
        )
        for line in self.bad[:5]:
            print("   ", line)
        return not self.bad


def llama(folder: Path) -> int:
    """llama.cpp reads the GGUF files: the same tokens from the text, the same continuation."""
    from llama_cpp import Llama

    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    held = True
    for name in FORMATS:
        if not name.startswith("gguf"):
            continue
        model = Llama(_path(folder, name), n_ctx=256, logits_all=True, verbose=False, n_threads=2)
        verdict = Verdict(name)
        for row in expected[name]:
            ids = model.tokenize(row["prompt"].encode(), add_bos=False, special=False)
            text = model.detokenize(row["out"]).decode("utf-8", errors="replace")
            drawn = "model" in FORMATS[name]  # random weights write no text, but broken bytes
            if ids != row["ids"] or (text != row["text"] and not drawn):
                verdict.bad.append(f"tokenizer: {row['prompt']!r} {ids} {row['ids']}")
            verdict.add(
                row,
                _llama_greedy(model, row["ids"]),
                _llama_forced(model, row),
                ROUTE if drawn else TIE,
            )
        held &= verdict.tell() and "chat_template" in str(model.metadata)
    return 0 if held else 1


def _llama_greedy(model: Any, ids: list[int]) -> list[int]:
    out = list(ids)
    model.reset()
    model.eval(ids)
    for _ in range(STEPS):
        out.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(out[-1:])
    return out[len(ids) :]


def _llama_forced(model: Any, row: dict[str, Any]) -> list[int]:
    ids, length = [*row["ids"], *row["out"]], len(row["ids"])
    model.reset()
    model.eval(ids)
    return [int(model.scores[i].argmax()) for i in range(length - 1, len(ids) - 1)]


def _extra(name: str) -> dict[str, Any]:
    """compressed-tensors 0.20 builds modules with unpacked zero-points, into which its own packed
    ones do not fit; its other way, decoding everything first, reads them."""
    if not name.startswith("ct") or "zeros" not in name:
        return {}
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def transformers(folder: Path) -> int:
    """transformers reads the safetensors folders; weights decompressed, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    def opened(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float32, **_extra(name)
        )

    return _compared(folder, ("ct", "bnb", "fp8"), opened)


def gptqmodel(folder: Path) -> int:
    """GPTQModel's own loader and its kernels of plain torch, on the CPU; the rest float32."""
    import torch
    from gptqmodel import BACKEND, GPTQModel

    def opened(name: str) -> Any:
        backend = BACKEND.AWQ_TORCH if name.startswith("awq") else BACKEND.GPTQ_TORCH
        loaded = GPTQModel.load(  # float16: scales are; in bfloat16, its default, it rounds them
            str(folder / name), device="cpu", backend=backend, dtype=torch.float16
        )
        kernels = {type(m).__name__ for m in loaded.model.modules() if hasattr(m, "qweight")}
        assert kernels == {"AwqTorchLinear" if name.startswith("awq") else "TorchLinear"}, kernels
        return loaded.model.float()

    return _compared(folder, ("gptq", "awq"), opened)


def _compared(folder: Path, starts: tuple[str, ...], opened: Callable[[str], Any]) -> int:
    """Models of transformers' kind, against what was expected of them."""
    import torch
    from transformers import AutoTokenizer

    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    held = True
    for name in FORMATS:
        if not name.startswith(starts):
            continue
        verdict = Verdict(name)
        model = opened(name).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        for row in expected[name]:
            if tokenizer.encode(row["prompt"], add_special_tokens=False) != row["ids"]:
                verdict.bad.append(f"tokenizer: {row['prompt']!r}")
            ids = torch.tensor([row["ids"] + row["out"]])
            with torch.inference_mode():
                forced = model(ids).logits[0].argmax(-1)[len(row["ids"]) - 1 : -1].tolist()
                out = list(row["ids"])
                for _ in range(STEPS):
                    out.append(int(model(torch.tensor([out])).logits[0, -1].argmax()))
            verdict.add(row, out[len(row["ids"]) :], forced, TIES.get(name, 1e-2))
        held &= verdict.tell()
    return 0 if held else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    does = {each.__name__: each for each in (make, llama, transformers, gptqmodel)}
    parser.add_argument("what", choices=[*does])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*FORMATS], help="these formats alone")
    args = parser.parse_args()
    for name in set(FORMATS) - set(args.only or FORMATS):
        del FORMATS[name]
    return does[args.what](args.folder)


if __name__ == "__main__":
    sys.exit(main())
