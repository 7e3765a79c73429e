"""Writes a GGUF file as an unquantised checkpoint in bfloat16: the baseline of quality figures.

    python -m scripts.dequantise_gguf MODEL.gguf FOLDER

For families whose checkpoints keep each tensor apart (Llama's layout). The tokenizer and the chat
template come from the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from ridgeline.engine.checkpoints.gguf.weights import GgufWeights
from ridgeline.engine.checkpoints.tensor_names import layouts_of, parts
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.engine.tokenization.gguf import chat_templates
from ridgeline.engine.tokenization.tokenizer import HfTokenizer
from ridgeline.modelspec.checkpoints.gguf_architectures.config import gguf_config
from ridgeline.modelspec.checkpoints.gguf_header import read_gguf
from ridgeline.modelspec.checkpoints.load import load_spec


def main() -> None:
    source, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True)
    file, spec = read_gguf(source), load_spec(source)
    layout = layouts_of(spec.family, ())[0]
    tensors = {}
    with GgufWeights(source, spec) as weights:
        for part in parts(spec):
            place = layout[part.key]
            if place.fused or place.stacked:
                raise SystemExit(f"{spec.family}: {part} is not a separate tensor")
            name = place.template.format(layer=part.layer)
            tensors[name] = weights.get(part).to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = gguf_config(file) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tokenizer = load_tokenizer(source)
    assert isinstance(tokenizer, HfTokenizer)
    tokenizer.inner.save(str(folder / "tokenizer.json"))
    templates = chat_templates(file.metadata)
    template = templates if isinstance(templates, str) else dict(templates)["default"]
    document = {"chat_template": template, "bos_token": "", "eos_token": ""}
    names = file.metadata["tokenizer.ggml.tokens"]
    for key in ("bos", "eos"):
        if config[f"{key}_token_id"] is not None:
            found = config[f"{key}_token_id"]
            document[f"{key}_token"] = names[found if isinstance(found, int) else found[0]]
    (folder / "tokenizer_config.json").write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
