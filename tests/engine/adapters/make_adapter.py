"""Random adapters as PEFT saves them, and the base with their weights merged."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LLAMA = {
    "q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn",
    "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp",
}  # fmt: skip


def save_adapter(
    directory: Path, base: Path, modules: list[str], rank: int = 4, seed: int = 0, **config: Any
) -> Path:
    """A random adapter for the modules `modules` of the checkpoint `base`; returns `directory`."""
    generator = torch.Generator().manual_seed(seed)
    directory.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.removesuffix(".weight").split(".")[-1] in modules:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            num_out, num_in = weight.shape
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, num_in, generator=generator) * 0.3
            tensors[f"{stem}.lora_B.weight"] = torch.randn(num_out, rank, generator=generator) * 0.3
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 6,
        "target_modules": modules, "bias": "none", "use_rslora": False, "use_dora": False,
        "lora_dropout": 0.1, "modules_to_save": None, "inference_mode": True, **config,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return directory


def merge(directory: Path, base: Path, adapter: Path) -> Path:
    """The base with W + B·A·scale, in `directory`."""
    shutil.copytree(base, directory)
    weights = load_file(base / "model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    root = math.sqrt(config["r"]) if config["use_rslora"] else config["r"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        up, down = tensors[name.replace("lora_A", "lora_B")].double(), tensors[name].double()
        own = name.removeprefix("base_model.model.").replace(".lora_A", "")
        added = up @ down * (config["lora_alpha"] / root)
        weights[own] = (weights[own].double() + added).float()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
