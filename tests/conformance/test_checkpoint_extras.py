"""Extra tensors in a checkpoint: harmless ones load, others are read or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.checkpoints.write_packed import copy_config
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.quantization_config import read_quantization_config
from ridgeline.modelspec.format import blocks
from ridgeline.modelspec.rewrite import with_activations
from tests.conformance.tiny_models import Loaded, load_ours, make_model

pytestmark = pytest.mark.slow

TOKENS = [3, 17, 42, 5, 66, 9, 28]


def logits_of(directory: Path) -> Tensor:
    return load_ours(directory).paged_logits(TOKENS, [4, 3], [5, 9])


def theirs(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, file, {"format": "pt"})


def change_config(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_head_that_differs_from_the_embeddings_it_is_tied_to_is_used(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    change_config(tmp_path, tie_word_embeddings=True)
    assert not load_spec(str(tmp_path)).tied_embeddings
    torch.testing.assert_close(logits_of(tmp_path), theirs(model), rtol=1e-4, atol=1e-4)


def test_a_head_that_equals_the_embeddings_stays_tied(tmp_path: Path) -> None:
    model = make_model("llama-tied-mha", tmp_path)

    def copy_head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_weights(tmp_path, copy_head)
    assert load_spec(str(tmp_path)).tied_embeddings
    torch.testing.assert_close(logits_of(tmp_path), theirs(model), rtol=1e-4, atol=1e-4)


def test_a_head_of_another_shape_than_its_config_says_is_refused(tmp_path: Path) -> None:
    make_model("llama-tied-mha", tmp_path)
    change_weights(tmp_path, lambda t: t.update({"lm_head.weight": torch.ones(5, 24)}))
    with pytest.raises(BadModel, match=r"lm_head\.weight"):
        logits_of(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.k_scale",
        "model.layers.1.self_attn.attn.v_scale",
        "model.layers.0.self_attn.qkv_proj.kv_scale",
        "model.layers.0.self_attn.k_proj.output_scale",
    ],
)
def test_scales_of_an_fp8_kv_cache_are_harmless(tmp_path: Path, name: str) -> None:
    model = make_model("llama", tmp_path)
    change_weights(tmp_path, lambda t: t.update({name: torch.tensor(0.5)}))
    torch.testing.assert_close(logits_of(tmp_path), theirs(model), rtol=1e-4, atol=1e-4)


def test_biases_that_the_config_does_not_name_must_be_zero(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    name = "model.layers.2.mlp.down_proj.bias"
    change_weights(tmp_path, lambda t: t.update({name: torch.zeros(24)}))
    torch.testing.assert_close(logits_of(tmp_path), theirs(model), rtol=1e-4, atol=1e-4)
    change_weights(tmp_path, lambda t: t.update({name: torch.full((24,), 1e-3)}))
    with pytest.raises(BadModel, match=r"down_proj\.bias"):
        logits_of(tmp_path)


OFFICIAL = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    "AutoTokenizer": "org/tokenizer",
}


def test_the_code_that_phi3_directories_carry_is_not_needed(tmp_path: Path) -> None:
    model = make_model("phi3", tmp_path)
    change_config(tmp_path, auto_map=OFFICIAL)
    torch.testing.assert_close(logits_of(tmp_path), theirs(model), rtol=1e-4, atol=1e-4)
    change_config(tmp_path, auto_map={**OFFICIAL, "AutoModel": "modeling_phi3.Phi3Bidirectional"})
    with pytest.raises(BadModel, match="auto_map"):
        load_spec(str(tmp_path))


def test_code_of_other_families_is_refused_even_under_known_names(tmp_path: Path) -> None:
    make_model("qwen2", tmp_path)
    change_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM"})
    with pytest.raises(BadModel, match="auto_map"):
        load_spec(str(tmp_path))


def test_gptq_rules_per_module_are_read() -> None:
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "dynamic": {
            r"-:.*layers\.1\.mlp.*": {},
            r"+:.*layers\.2\..*down_proj": {"bits": 8, "group_size": 64},
            r".*o_proj": {"sym": False},
        },
    }
    read = read_quantization_config(config, "here")
    assert (read.at("model.layers.0.self_attn.q_proj").bits, read.group_size) == (4, 32)
    down = read.at("model.layers.2.mlp.down_proj")
    assert (down.bits, down.group_size) == (8, 64)
    assert read.at("model.layers.2.self_attn.o_proj").zeros
    assert not read.at("model.layers.2.self_attn.q_proj").zeros


def test_rules_that_only_leave_modules_out_change_nothing() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    read = read_quantization_config({**config, "dynamic": {r"-:.*lm_head": {}}}, "here")
    assert read == read_quantization_config(config, "here")


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_gptq", "auto_round:auto_awq"])
def test_auto_round_in_the_packing_of_others_is_read(packing: str) -> None:
    config = {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "iters": 200,
        "autoround_version": "0.9",
    }
    read = read_quantization_config(config, "here")
    assert (read.codec, read.bits, read.group_size) == (packing.split("auto_")[-1], 4, 128)


def test_dense_sparsity_is_no_sparsity() -> None:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "sparsity_config": {"format": "dense", "global_sparsity": 0.14},
        "kv_cache_scheme": {"num_bits": 8},
    }
    assert read_quantization_config(config, "here").bits == 4


def test_a_modelopt_directory_is_read_from_its_own_file(tmp_path: Path) -> None:
    """NVFP4 of every linear, its values on the grid: the model that the values stand for."""
    model = make_model("llama", tmp_path, hidden_size=32, intermediate_size=64, head_dim=8)
    generator = torch.Generator().manual_seed(11)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([table, -table])

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "proj.weight" in name]:
            num_out, num_in = tensors.pop(name).shape
            codes = torch.randint(0, 16, (num_out, num_in), generator=generator)
            scale = (torch.rand(num_out, num_in // 16, generator=generator) + 0.5).to(
                torch.float8_e4m3fn
            )
            module = name.removesuffix(".weight")
            tensors[name] = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
            tensors[f"{module}.weight_scale"] = scale
            tensors[f"{module}.weight_scale_2"] = torch.tensor(0.03)
            tensors[f"{module}.input_scale"] = torch.tensor(0.7)
            dense = torch.empty(num_out, num_in)
            for row in range(num_out):
                for column in range(num_in):
                    step = float(scale[row, column // 16]) * 0.03
                    dense[row, column] = float(table[codes[row, column]]) * step
            model.get_parameter(name).data.copy_(dense)

    with torch.no_grad():
        change_weights(tmp_path, quantise)
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    own = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    torch.testing.assert_close(logits_of(tmp_path), theirs(model), rtol=1e-3, atol=1e-3)


def test_ministral_3_is_read_as_it_is_published(tmp_path: Path) -> None:
    """Within an image model, in FP8 with one scale per weight; static scales of inputs are left."""
    model = make_model("mistral3-scaled", tmp_path)

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "language_model" in name and "_proj." in name]:
            module = name.removesuffix(".weight")
            scale = (tensors[name].abs().max() / 400).bfloat16()
            tensors[name] = (tensors[name] / scale.float()).to(torch.float8_e4m3fn)
            tensors[f"{module}.weight_scale_inv"] = scale
            tensors[f"{module}.activation_scale"] = torch.tensor(0.1)
            inside = name.replace("language_model.model.", "model.language_model.")
            model.get_parameter(inside).data.copy_(tensors[name].float() * scale.float())

    change_weights(tmp_path, quantise)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        "weight_block_size": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits_of(tmp_path), theirs(model), rtol=1e-3, atol=1e-3)


def test_quantised_models_keep_tokenizer_templates_and_ends(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_model("llama", source)
    files = {
        "generation_config.json": "{}",
        "chat_template.jinja": "a",
        "special_tokens_map.json": "{}",
        "added_tokens.json": "{}",
        "tokenizer_config.json": "{}",
        "additional_chat_templates/tool_use.jinja": "b",
    }
    for name, text in files.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    target.mkdir()
    copy_config(source, target, load_spec(str(source)), {"quant_method": "none"})
    assert {name: (target / name).read_text() for name in files} == files


def mxfp4_llama(directory: Path) -> Any:
    """A Llama whose linears are on the grid of MXFP4, stored as compressed-tensors stores it."""
    model = make_model("llama", directory, hidden_size=64, intermediate_size=96, head_dim=16)
    generator = torch.Generator().manual_seed(4)

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "proj.weight" in name]:
            num_out, num_in = tensors.pop(name).shape
            packed = torch.randint(0, 256, (num_out, num_in // 2), generator=generator)
            exponents = torch.randint(120, 124, (num_out, num_in // 32), generator=generator)
            tensors[f"{name}_packed"] = packed.to(torch.uint8)
            tensors[f"{name}_scale"] = exponents.to(torch.uint8)
            dense = torch.empty(num_out, num_in)
            for row in range(num_out):
                for column in range(num_in):
                    code = int(packed[row, column // 2]) >> 4 * (column % 2) & 15
                    value = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]
                    scale = 2.0 ** (int(exponents[row, column // 32]) - 127)
                    dense[row, column] = (-value if code & 8 else value) * scale
            model.get_parameter(name).data.copy_(dense)

    with torch.no_grad():
        change_weights(directory, quantise)
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": group},
    }
    change_config(directory, quantization_config=quantization)
    return model


def test_mxfp4_linears_run_packed_and_exactly(tmp_path: Path) -> None:
    model = mxfp4_llama(tmp_path)
    spec = load_spec(str(tmp_path))
    assert spec.layers[0].mlp.down.format == blocks(8, 32)
    assert any("4-bit floats" in line and "exactly" in line for line in spec.rewrites)
    exact = with_activations(spec, "float32")
    decoder = load_decoder(str(tmp_path), exact, device="cpu", compute_dtype=torch.float32)
    cache = KvCache.allocate(exact, 16, 16, torch.float32, "cpu")
    runner = TorchRunner(decoder, cache, build_attention("torch", exact, cache))
    found = Loaded(runner, 16, 16).paged_logits(TOKENS, [4, 3], [5, 9])
    torch.testing.assert_close(found, theirs(model), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("field", ["shape", "dtype", "data_offsets"])
@pytest.mark.parametrize("value", [None, "x", [1], [9, 3], [-4, 0], [0, 10**12]])
def test_a_malformed_entry_of_a_tied_head_is_an_error(
    tmp_path: Path, field: str, value: object
) -> None:
    make_model("llama-tied-mha", tmp_path)
    change_weights(tmp_path, lambda t: t.update({"lm_head.weight": torch.ones(67, 24)}))
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["lm_head.weight"][field] = value
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[8 + length :])
    with pytest.raises(BadModel, match=r"model\.safetensors|lm_head"):
        logits_of(tmp_path)
