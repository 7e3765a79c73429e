"""Export a trained demo model as a Hugging Face directory, check it, and write its card."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch
from demo_card import agreement, card, heldout_texts, load_exported, perplexity
from demo_model import TinyLlama
from demo_windows import AGAIN, copied
from safetensors.torch import save_file
from tokenizers import Tokenizer

TARGETS = {"demo": "demo", "draft": "demo-draft"}
END_OF_TEXT_ID, END_OF_TURN_ID = 0, 4


def heldout_ids(work: Path, heldout: Path) -> list[int]:
    """The held-out code as one token stream."""
    tok = Tokenizer.from_file(str(work / "tokenizer.json"))
    return tok.encode((heldout / "code.txt").read_text(), add_special_tokens=False).ids


def config(model: TinyLlama) -> dict:
    """What transformers needs to rebuild the network."""
    s = model.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": s.max_positions,
        "rms_norm_eps": s.eps,
        "rope_theta": s.theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": [END_OF_TEXT_ID, END_OF_TURN_ID],
        "pad_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def generation_config() -> dict:
    return {
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": [END_OF_TEXT_ID, END_OF_TURN_ID],
        "pad_token_id": END_OF_TEXT_ID,
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


@torch.no_grad()
def check(folder: Path, model: TinyLlama) -> float:
    """Largest logit difference between transformers and the rounded weights, in fp32."""
    from transformers import LlamaForCausalLM

    for p in model.parameters():
        p.copy_(p.bfloat16().float())
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, model.shape.vocab, (2, 300), generator=torch.Generator().manual_seed(0))
    gap = (reference(ids).logits - model.logits(ids)).abs().max().item()
    if gap > 1e-4:
        raise RuntimeError(f"export differs from transformers by {gap}")
    return gap


def write_model(model: TinyLlama, tokenizer: Path, folder: Path) -> float:
    """The model as a directory, with the tokenizer's files of another one; checked against
    transformers, whose largest difference it gives."""
    weights = {n: p.detach().bfloat16().contiguous() for n, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config(model))
    write_json(folder / "generation_config.json", generation_config())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    return check(folder, model)


def export(model: TinyLlama, clock: dict, work: Path, assets: Path, size: str) -> None:
    """Write the directory next to its final place, check it, then move its files in."""
    target = assets / TARGETS[size]
    fresh = target.with_name(target.name + ".tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    gap = write_model(model, work, fresh)
    if (work / f"{size}.csv").exists():
        shutil.copyfile(work / f"{size}.csv", fresh / "loss.csv")
    manifest = {"training": clock | {"logit_gap_to_transformers": gap}}
    if size == "demo":
        manifest["data"] = json.loads((work / "manifest.json").read_text())
    write_json(fresh / "manifest.json", manifest)
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(fresh.iterdir()):
        path.chmod(0o644)
        path.replace(target / path.name)
    fresh.rmdir()
    update_manifest(target, {})
    print(f"{target}: logits agree with transformers within {gap:.1e}", flush=True)


def update_manifest(folder: Path, extra: dict) -> dict:
    """Refresh the file hashes and add figures measured after the export."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | extra
    files = [p for p in sorted(folder.iterdir()) if p.name != path.name]
    manifest["model_files"] = {p.name: sha256(p) for p in files}
    temporary = path.with_suffix(".tmp")
    write_json(temporary, manifest)
    temporary.replace(path)
    return manifest


def write_card(work: Path, assets: Path, size: str, note: str) -> None:
    """Evaluate one exported model and write its README and figures."""
    demo_folder, folder = assets / TARGETS["demo"], assets / TARGETS[size]
    model = load_exported(folder)
    tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = heldout_texts(assets / "heldout")
    results = {"heldout": {name: perplexity(model, t, tok) for name, t in texts.items()}}
    if size == "demo":
        heads = {"copy": AGAIN[1], "again": "\n\n# The same again:\n"}
        results["copies"] = {
            name: round(copied(model, tok, texts["code"], head), 4) for name, head in heads.items()
        }
    if size == "draft":
        demo = load_exported(demo_folder)
        results["draft"] = {name: agreement(demo, model, t, tok) for name, t in texts.items()}
    print(json.dumps(results, indent=1), flush=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    data = json.loads((work / "manifest.json").read_text())
    run = manifest["training"] | {"note": note}
    (folder / "README.md").write_text(card(size, folder, data, run, model, results))
    update_manifest(folder, {"training": run, "evaluation": results})
