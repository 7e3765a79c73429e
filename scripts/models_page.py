"""The reference page of model families: what runs, what is only sized, and how it was tested."""

from __future__ import annotations

import torch

from ridgeline.compress.writers.gguf_keys import WRITTEN
from ridgeline.engine.execution.layers.native import NativeForward
from ridgeline.modelspec.checkpoints.gguf_architectures.rows import ARCHITECTURES
from ridgeline.modelspec.cost import cost_model
from ridgeline.modelspec.families.registry import FAMILIES, spec_from_config
from ridgeline.modelspec.families.shapes import planning_config, planning_table, shape_table
from ridgeline.modelspec.families.unsupported import PLANNED_AS, REFUSED, UNSUPPORTED
from ridgeline.modelspec.families.wrappers import WRAPPERS
from ridgeline.modelspec.model import ModelSpec
from tests.conformance.quantised_formats import FORMATS, matrix
from tests.conformance.tiny_models import FAMILIES as TESTED

TESTED_FORMATS = matrix()

NO_GGUF = {
    **dict.fromkeys(
        ("cwm", "helium", "hyperclovax", "ministral", "vaultgemma"),
        "no: llama.cpp has no such architecture",
    ),
    "internlm3": "read (as `llama`)",
    "mistral4": "no: llama.cpp's converter leaves out how queries grow",
    "gemma3n_text": "read; not written: `quantize` does not know several hidden states (AltUp)",
}
"""Why a family has no GGUF files, or none that are written here."""

TESTED_AS = {"kimi_k2": "deepseek_v3"}
"""Families that no test configures, and the family whose layers they are."""
HEAD = """\
# Model families

The `model_type` of a model's `config.json` decides how it is read; a field that is not understood
is an error that names it, and an unknown family is refused with the nearest known one and the
fields that differ.

*Engine*: `native` are the fused CPU kernels, `torch` runs on every device. Every family but
`kimi_k2`, which is read and run as DeepSeek-V3, is compared with transformers on small random
models: log-probabilities within 1e-4 and the same greedy tokens but for ties, in whole prompts, in
chunks and in mixed batches. Native layers are compared with torch layers in every weight format of
the engine. Batching, preemption, prefix caching and speculation are checked token by token on
Llama, Mistral, Ministral 3, Gemma 3, Gemma 3n (over an INT8 KV cache), Gemma 4 (dense, and with
experts next to the dense MLP), gpt-oss, GLM-4.5, DeepSeek-V3, Cohere 2, Llama 4 and the demo model,
on Qwen3.5 without the last two. Latent attention (DeepSeek, Kimi K2, GLM-4.7-Flash, Youtu, Mistral
Small 4) caches one compressed row per token and layer, absorbs the projections in decode steps and
expands them in long runs of a prompt; layers that predict further tokens (MTP) are left unread.
Ministral 3 scales queries beyond its trained context: an engine with `--max-model-len` up to that
context, where no query is scaled, has native layers.

*GGUF*: a family that is only read, `quantize --format gguf` refuses by name before it computes. So
it does with a model that llama.cpp would compute otherwise, naming the field: windows of Mistral,
norms of q and k in a small Command R, queries that are not compressed in a DeepSeek of other depths
than the published ones, chunks of Llama 4 other than 8192, fewer key heads than query heads in
dots.llm1 and OLMoE, scores of OLMoE that are renormalised, two rope bases in Mellum, biases that
llama.cpp has no place for. A file of Kimi K2 says the limits of its rotary embedding, as published
ones do; Ridgeline computes with them, llama.cpp (b11434) with YaRN's defaults.

*Plan*: `plan`, `predict`, `simulate` and `inspect` know the family. *Quantised*: formats of other
projects in which a random checkpoint of the family, every linear quantised, gave the logits of its
dequantised weights (`tests/conformance/test_quantised_families.py`); stacked experts, as
gpt-oss, Llama 4 and Gemma 4 store them, stay dense there, and gpt-oss' own MXFP4 experts are
tested apart. All six are GPTQ, AWQ, FP8 in blocks, packed compressed-tensors, MXFP4 and
bitsandbytes' NF4.

The names of published shapes work in `inspect`, `plan` and `predict` and, but for the largest, as
`dummy:NAME` with random weights. On 28 November 2026 the shapes of Qwen3, Qwen3-VL (its text),
Qwen3.5 from 27B, DeepSeek-V3, -V3.2 and -R1, Kimi K2, K2.5 and K3, gpt-oss, Llama 4, Mixtral,
Gemma 4 26B and 31B, GLM-5, MiMo-V2-Flash and MiniMax-M3 were compared, field by field, with the
copies of their config.json in AIConfigurator's repository, as far as it has them: none differed.
Mellum 2, Youtu-LLM and VaultGemma were compared with copies of their config.json in tests and
reports of other public projects, Ministral 8B with one that has its sizes alone. Of the other
families below `phi3` in the table, of Mistral NeMo, SmolLM2 1.7B and the other image models, the
shapes were written down from memory and only their parameter counts are tested: compare them with
the model's own config.json before relying on a rope theta or token id.
"""
WRAPPED = """
## The text of multimodal models

Weights of the image encoder are left unread; a request with an image is refused by name. Small
random models of these types give the logits of transformers' whole model; those of Gemma
and Llama 4 were compared with its text model alone.

| model_type | text model | published shapes |
|---|---|---|
"""
PLANNED = """
## Sized only

`plan`, `predict` and `inspect` know these; the engine refuses them with the reason.

| model_type | why the engine does not run it | published shapes |
|---|---|---|
"""
NOT_YET = """
## Not supported

Refused by `model_type`, with the reason:

REASONS

Image, video and audio encoders are not run.
"""


def models_page() -> str:
    """The page, from the tables of families, wrappers, shapes and tests."""
    lines = [HEAD, "## Families that run", ""]
    lines += [
        "| model_type | engine | plan | GGUF | quantised | tested against | published shapes |",
        "|---|---|---|---|---|---|---|",
    ]
    gguf = {arch.family for arch in ARCHITECTURES.values()} | {
        "mixtral",
        "olmo3",
        "deepseek_v2",
        "kimi_k2",
        "glm4_moe_lite",
        "ministral3",
        "solar_open",
        "youtu",
    }  # "llama" with experts, "olmo2" with windows, "glm4moe" without dense layers, "mistral3" with
    # scaled queries, all of latent attention as "deepseek2"
    for family in FAMILIES:
        tests = sum(model_type in (family, f"{family}_text") for model_type, _ in TESTED.values())
        against = f"transformers, {tests} configuration{'s' if tests > 1 else ''}"
        if not tests:
            against = f"as `{TESTED_AS[family]}`, which it is run as"
        known = "read, written" if family in WRITTEN else "read"
        read = NO_GGUF.get(family, known if family in gguf else "no")
        cells = (f"`{family}`", _layers(family), _plans(family), read, _quantised(family))
        lines.append(f"| {' | '.join((*cells, against, _shapes(family)))} |")
    text = WRAPPED.splitlines()
    for name, wrapper in WRAPPERS.items():
        families = ", ".join(f"`{family}`" for family in dict.fromkeys(wrapper.text_types.values()))
        text.append(f"| `{name}` | {families} | {_shapes(name)} |")
    text += PLANNED.splitlines()
    planned = {**UNSUPPORTED, **PLANNED_AS}
    text += [f"| `{name}` | {why} | {_shapes(name)} |" for name, why in planned.items()]
    return "\n".join([*lines, *text]) + "\n" + NOT_YET.replace("REASONS", _refused())


def _refused() -> str:
    """One line per reason, with the model types that it refuses."""
    reasons = dict.fromkeys(REFUSED.values())
    return "\n".join(
        f"- {', '.join(f'`{name}`' for name, own in REFUSED.items() if own == why)}: {why}"
        for why in reasons
    )


_SIZES = {"dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6}}
"""Of families whose default sizes are incomplete."""


def _spec(family: str) -> ModelSpec:
    """The first published model of a family; where there is none, one of default sizes."""
    published = {**shape_table(), **planning_table()}
    name = next((n for n, row in published.items() if row["model_type"] == family), None)
    config = {"model_type": family, **_SIZES.get(family, {})}
    config = config if name is None else planning_config(name)
    config.pop("quantization_config", None)
    return spec_from_config(config, name=family)


def _layers(family: str) -> str:
    why_not = NativeForward.why_not(_spec(family), torch.device("cpu"), torch.float32)
    return "torch: " + "; ".join(why_not) if why_not else "native, torch"


def _plans(family: str) -> str:
    """Whether a spec of the family can be priced."""
    return "yes" if cost_model(_spec(family)).linear_flops_per_token else "no"


def _quantised(family: str) -> str:
    """The formats that the test matrix holds for a family."""
    formats = TESTED_FORMATS.get(family, ())
    if not formats:
        return "not tested"
    return f"all {len(FORMATS)}" if len(formats) == len(FORMATS) else ", ".join(formats)


def _shapes(model_type: str) -> str:
    tables = {**shape_table(), **planning_table()}
    return ", ".join(f"`{n}`" for n, row in tables.items() if row["model_type"] == model_type)
