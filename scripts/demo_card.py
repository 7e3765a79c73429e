"""Evaluate the exported demo models and write their model cards.

Everything here reads the shipped files, never the training state: weights are already rounded
to bfloat16, and generation goes through transformers, as a user's would.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_data import HELDOUT
from demo_model import Shape, TinyLlama
from demo_pairs import render
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

WINDOW = 2048
BUCKETS = ((0, 128), (128, 512), (512, 1024), (1024, 2048))
TURN_END, TEXT_END = 4, 0
SAMPLES: tuple[tuple[str, str, float], ...] = (
    ("code", 'def factorial(n):\n    """Return the factorial of n."""\n', 0.0),
    (
        "code",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
        "    def push(self, item):\n",
        0.0,
    ),
    ("chat", "What does textwrap.dedent do?", 0.0),
    ("code", "import os\nimport sys\n\ndef read_lines(path):\n", 0.7),
    ("code", "    def test_add(self):\n        self.assertEqual(", 0.7),
    ("chat", "Write a Python function `clamp(x, low, high)` that limits x to a range.", 0.7),
)


def read_shape(folder: Path) -> Shape:
    """The architecture as the exported config states it."""
    c = json.loads((folder / "config.json").read_text())
    return Shape(
        vocab=c["vocab_size"],
        hidden=c["hidden_size"],
        layers=c["num_hidden_layers"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        ffn=c["intermediate_size"],
        max_positions=c["max_position_embeddings"],
        theta=c["rope_theta"],
        eps=c["rms_norm_eps"],
    )


def load_exported(folder: Path) -> TinyLlama:
    """The model as shipped: bfloat16-rounded weights, computed in fp32."""
    model = TinyLlama(read_shape(folder))
    model.load_state_dict(
        {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    )
    return model.eval()


def heldout_texts(heldout: Path) -> dict[str, str]:
    """The three held-out texts, chats rendered with the chat template."""
    lines = (heldout / "chat.jsonl").read_text().splitlines()
    return {
        "code": (heldout / "code.txt").read_text(),
        "docs": (heldout / "docs.txt").read_text(),
        "chat": "".join(render(json.loads(line)["messages"]) for line in lines),
    }


def windows(ids: list[int]) -> Iterator[Tensor]:
    """Non-overlapping windows; each starts with the end-of-text token, as in training."""
    for start in range(0, len(ids), WINDOW - 1):
        yield torch.tensor([[TEXT_END, *ids[start : start + WINDOW - 1]]])


@torch.no_grad()
def token_losses(model: TinyLlama, ids: list[int]) -> list[Tensor]:
    """Negative log-likelihood of every token, one tensor per window."""
    out = []
    for x in windows(ids):
        logits = model.logits(x)[0, :-1]
        out.append(F.cross_entropy(logits, x[0, 1:], reduction="none"))
    return out


def perplexity(model: TinyLlama, text: str, tok: Tokenizer) -> dict:
    """Perplexity per token, bits per byte, and perplexity by position in the window."""
    ids = tok.encode(text, add_special_tokens=False).ids
    losses = token_losses(model, ids)
    total = float(sum(x.sum() for x in losses))
    by_position = {}
    for low, high in BUCKETS:
        part = torch.cat([x[low:high] for x in losses])
        by_position[f"{low}-{high - 1}"] = round(math.exp(part.mean().item()), 3)
    return {
        "tokens": len(ids),
        "bytes": len(text.encode()),
        "loss": round(total / len(ids), 4),
        "perplexity": round(math.exp(total / len(ids)), 3),
        "bits_per_byte": round(total / math.log(2) / len(text.encode()), 4),
        "perplexity_by_position": by_position,
    }


@torch.no_grad()
def agreement(demo: TinyLlama, draft: TinyLlama, text: str, tok: Tokenizer) -> dict:
    """How often speculative decoding would accept one drafted token, on held-out text."""
    ids = tok.encode(text, add_special_tokens=False).ids
    same = overlap = count = 0.0
    for x in windows(ids):
        p, q = (m.logits(x)[0].softmax(-1) for m in (demo, draft))
        same += (p.argmax(-1) == q.argmax(-1)).sum().item()
        overlap += torch.minimum(p, q).sum().item()
        count += p.shape[0]
    return {"greedy": round(same / count, 4), "sampling": round(overlap / count, 4)}


def complete(folder: Path, length: int = 96) -> list[dict]:
    """The card's completions, straight from ``generate``."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    tok = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    results = []
    for kind, prompt, temperature in SAMPLES:
        text = prompt
        if kind == "chat":
            text = render([{"role": "user", "content": prompt}], prompt=True)
        ids = tok(text, return_tensors="pt", add_special_tokens=False)
        torch.manual_seed(0)
        how = {"do_sample": True, "temperature": temperature, "top_k": 0}
        out = model.generate(
            **ids, max_new_tokens=length, **(how if temperature else {"do_sample": False})
        )
        new = tok.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=False)
        results.append({"kind": kind, "prompt": prompt, "temperature": temperature, "out": new})
    return results


def loss_summary(path: Path) -> list[dict]:
    """About ten rows of the loss record, evenly spaced, the last one included."""
    rows = list(csv.DictReader(path.open()))
    picks = [round(i * (len(rows) - 1) / 9) for i in range(10)]
    return [rows[i] for i in sorted(set(picks))]


def heldout_table(results: dict[str, dict]) -> str:
    lines = ["| held-out text | bytes | perplexity / token | bits / byte |", "|---|---|---|---|"]
    for name, r in results.items():
        lines.append(
            f"| {name} | {r['bytes']} | {r['perplexity']:.2f} | {r['bits_per_byte']:.3f} |"
        )
    return "\n".join(lines)


def position_table(results: dict[str, dict]) -> str:
    names = list(results["code"]["perplexity_by_position"])
    lines = ["| position | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for name in ("code", "docs"):
        values = results[name]["perplexity_by_position"].values()
        lines.append(f"| {name} | " + " | ".join(f"{v:.2f}" for v in values) + " |")
    return "\n".join(lines)


def curve_table(rows: list[dict]) -> str:
    lines = ["| step | tokens | sequence | training loss |", "|---|---|---|---|"]
    lines += [f"| {r['step']} | {r['tokens']} | {r['seq_len']} | {r['loss']} |" for r in rows]
    return "\n".join(lines)


def sample_section(samples: list[dict]) -> str:
    """Completions, verbatim; four back-quotes because answers contain three."""
    out = []
    for i, s in enumerate(samples, 1):
        mode = f"temperature {s['temperature']}, seed 0" if s["temperature"] else "greedy"
        body = s["prompt"] + s["out"] if s["kind"] == "code" else s["out"]
        lead = f"**{i}. {s['kind']}, {mode}**"
        if s["kind"] == "chat":
            lead += f" — user: {s['prompt']}"
        else:
            lead += f" — the prompt is the first {s['prompt'].rstrip().count(chr(10)) + 1} line(s)"
        out.append(f"{lead}\n\n````text\n{body.rstrip()}\n````")
    return "\n\n".join(out)


CARD = """---
license: psf-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# {title}

{lead}

## Architecture

Llama (`LlamaForCausalLM`), {params:,} parameters ({embedding:,} of them in the tied embedding):
{layers} layers, hidden size {hidden}, {heads} heads and {kv_heads} key/value heads of
{head_dim} dimensions, feed-forward size {ffn}, RoPE (theta {theta:g}), at most
{max_positions} positions.
Weights are stored as bfloat16; all figures below were measured after that rounding, computing
in fp32. Byte-level BPE tokenizer with {vocab} tokens, trained on the same text.

## Training

- {tokens:,} tokens seen in {steps} steps of {batch} tokens; {minutes:.1f} minutes on two cores
  of x86-64 server CPUs, shared with other jobs; fp32, products in bfloat16 where it says so below.
- {recipe}
- Data: {source}
  ({train_bytes:,} bytes, {train_tokens:,} tokens, of which this run saw {epochs:.2f} epochs):
  source, a capped share of its tests, the manual's reST, and chat pairs mined from docstrings,
  function source and manual entries ({chat_share:.0%} of the bytes). Every file with its SHA-256
  and split is in `{manifest_path}`.
- Sequences of 512 tokens, then 1024 and 2048 for the last 13 % of the time.
- The learning rate warms up over 2 % and falls linearly to zero, by share of the time budget;
  `loss.csv` records progress, tokens and multiplier of each logged step. `--tokens` takes a
  phase's token count in place of the clock. That is repeatable, but it is not this run bit for
  bit: sequence lengths and multipliers then follow tokens, not the clock of a shared machine.
{note}
{curve}

## Held-out quality

Whole modules were kept out of training together with their tests, manual pages and chat pairs:
{heldout}.
Windows of {window} tokens, no overlap, each token scored once. {overlap:.1%} of the
held-out code's long lines (40 characters or more) occur verbatim elsewhere in the training text.

{table}

Perplexity by position in the window:

{positions}
{extra}
## Completions, unedited

At most 96 new tokens, first try, nothing picked or cut.

{samples}

## Limitations

Badly under-trained: {tokens_per_param:.1f} tokens per parameter, where about 20 are usual. Only
the surface of Python is recognisable (indentation, definitions, call syntax, docstring style);
the code is mostly meaningless and often not valid. Under greedy decoding it falls into loops, see
the completions. The chat template works (it answers in turn, ends the turn, fences code), but
answers imitate the tone of the Python manual and rarely concern what was asked. It is meant as a
small trained workload for tests and demonstrations of an inference engine, not as an assistant;
loops make greedy output easy to predict, so speed measured on it with speculative decoding says
little about other models. English and Python only; no safety tuning of any kind.

## Licence

The training text is the Python standard library and its documentation, copyright Python Software
Foundation, PSF License Version 2 (https://docs.python.org/3.11/license.html). The weights were
trained from scratch for this project; no other model, data set or weights were used.
"""

LEADS = {
    "demo": (
        "Ridgeline demo model",
        "A small language model of Python code, trained from scratch by this project's own\n"
        "`scripts/train_demo_model.py`, so that the engine can be tried, tested and judged on\n"
        "real trained weights without a download.",
        "Muon on the matrices, AdamW on embeddings and norms; next-token cross-entropy.",
    ),
    "draft": (
        "Ridgeline demo draft model",
        "The draft model that goes with `demo` for speculative decoding: same tokenizer, about a\n"
        "tenth of the parameters.",
        "Muon on the matrices, AdamW on embeddings and norms; next-token cross-entropy for the\n"
        "  first 30 % of the time, then distillation: cross-entropy against the demo model's\n"
        "  distribution (the loss below is then against that distribution, not against the text).\n"
        "  Embeddings start from the leading principal components of the demo's.",
    ),
}


def copies_section(result: dict | None) -> str:
    if not result:
        return ""
    return (
        "\nOf held-out code that is shown a second time (16 pieces of 500 characters) it names\n"
        f"{result['copy']:.1%} of the tokens behind the line `# Copy:`, which training has, and\n"
        f"{result['again']:.1%} behind `# The same again:`, which it has not.\n"
    )


def agreement_section(result: dict | None) -> str:
    if not result:
        return ""
    lines = [
        "\n## As a draft for `demo`\n",
        "Share of positions of held-out text where one drafted token would be accepted (greedy:",
        "same top token; sampling: overlap of the two distributions at temperature 1):\n",
        "| held-out text | greedy | sampling |\n|---|---|---|",
    ]
    lines += [f"| {k} | {v['greedy']:.1%} | {v['sampling']:.1%} |" for k, v in result.items()]
    return "\n".join(lines) + "\n"


def card(size: str, folder: Path, data: dict, run: dict, model: TinyLlama, ev: dict) -> str:
    """Fill the template; ``run`` holds the counters and a note on anything out of the ordinary."""
    title, lead, recipe = LEADS[size]
    s = model.shape
    params = sum(p.numel() for p in model.parameters())
    return CARD.format(
        title=title, lead=lead, recipe=recipe, source=data["source"], window=WINDOW,
        params=params, tokens_per_param=run["tokens"] / params,
        epochs=run["tokens"] / data["train_tokens"],
        note=f"- {run['note']}\n" if run.get("note") else "", embedding=s.vocab * s.hidden,
        layers=s.layers, hidden=s.hidden, heads=s.heads, kv_heads=s.kv_heads, ffn=s.ffn,
        head_dim=s.head_dim, theta=s.theta, max_positions=s.max_positions, vocab=s.vocab,
        tokens=run["tokens"], steps=run["step"], minutes=run["seconds"] / 60,
        batch=round(run["tokens"] / run["step"]), train_bytes=data["train_bytes"],
        train_tokens=data["train_tokens"], overlap=data["heldout_line_overlap"],
        chat_share=data["train_chat_bytes"] / data["train_bytes"],
        heldout=", ".join(f"`{m}`" for m in sorted(HELDOUT)),
        curve=curve_table(loss_summary(folder / "loss.csv")), table=heldout_table(ev["heldout"]),
        positions=position_table(ev["heldout"]),
        extra=copies_section(ev.get("copies")) + agreement_section(ev.get("draft")),
        samples=sample_section(complete(folder)),
        manifest_path="manifest.json" if size == "demo" else "../demo/manifest.json",
    )  # fmt: skip
