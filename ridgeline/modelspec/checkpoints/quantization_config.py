"""Reads the `quantization_config` of quantised checkpoints: every key is understood, harmless or an
error.

A config that is unknown, or that contradicts itself, is refused here with the reason; what the
tensors themselves say is checked when they are read (`ridgeline.engine.checkpoints`).

| `quant_method` | what is understood |
|---|---|
| gptq | 2, 3, 4, 8 bits, v1 and v2 zero-points, act-order, `dynamic` rules |
| auto-round | GPTQ and AWQ packing |
| awq | the GEMM layout, 4 bits |
| compressed-tensors | pack-, int-, naive-, float-quantized, nvfp4- and mxfp4-pack-quantized |
| compressed-tensors | sparse-24-bitmask, where nothing is quantised |
| fp8 | e4m3 in blocks (`weight_scale_inv`) or with one scale per tensor |
| fbgemm_fp8 | e4m3 with one scale per output |
| modelopt | FP8 and NVFP4, also from hf_quant_config.json |
| bitsandbytes | nf4 and fp4 (double quantisation too), LLM.int8 |
| mxfp4 | the experts of gpt-oss |
| torchao | nothing: refused with the reason |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.json_files import read_json
from ridgeline.modelspec.checkpoints.packed_config import KEY
from ridgeline.modelspec.checkpoints.quantised import FIX, SPARSE, QuantisedCheckpoint

_OLD_GPTQ, _MODELOPT = "quantize_config.json", "hf_quant_config.json"
"""Where AutoGPTQ and modelopt write what later versions write into config.json."""

_RECIPE = "made"
"""Where `ridgeline quantize` notes how it made a checkpoint of any method."""
_UNDERSTOOD: Mapping[str, str] = {
    "gptq": "bits group_size sym desc_act checkpoint_format format dynamic is_marlin_format w_bit "
    "q_group_size",
    "auto-round": "bits group_size sym packing_format data_type extra_config",
    "awq": "bits w_bit group_size q_group_size zero_point version format modules_to_not_convert",
    "bitsandbytes": "load_in_4bit load_in_8bit bnb_4bit_quant_type llm_int8_threshold "
    "bnb_4bit_use_double_quant llm_int8_skip_modules",
    "compressed-tensors": "config_groups format sparsity_config transform_config ignore",
    "fbgemm_fp8": "modules_to_not_convert",
    "fp8": "fmt weight_block_size activation_scheme modules_to_not_convert ignored_layers "
    "scale_fmt dequantize",
    "mxfp4": "modules_to_not_convert dequantize",
    "modelopt": "quant_algo quantization config_groups ignore exclude_modules group_size "
    "kv_cache_quant_algo producer",
}
"""Keys that decide how weights are decoded, or that the tensors themselves show (modules left out).
"""
_HARMLESS: Mapping[str, str] = {
    # how the quantisation was computed, and hints for other engines' kernels
    "gptq": "damp_percent damp_auto_increment static_groups true_sequential model_name_or_path "
    "model_file_base_name meta pack_dtype lm_head tokenizer dataset batch_size pad_token_id "
    "block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize "
    "use_exllama disable_exllama max_input_length exllama_config cache_block_outputs use_cuda_fp16 "
    "model_seqlen backend parallel_packing mse method quantizer act_group_aware hyb_act v2 "
    "v2_alpha gptaq failsafe fallback offload_to_disk offload_to_disk_path",
    "auto-round": "amp autoround_version backend batch_size block_name_to_quantize "
    "enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input gradient_accumulate_steps "
    "iters low_gpu_mem_usage lr minmax_lr nsamples quant_block_list scale_dtype seqlen "
    "super_bits super_group_size to_quant_block_names act_bits act_data_type act_dynamic "
    "act_group_size act_sym static_kv_dtype",
    "awq": "backend do_fuse fuse_max_seq_len modules_to_fuse exllama_config method quantizer meta "
    "desc_act sym lm_head pack_dtype checkpoint_format",
    "bitsandbytes": "_load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage "
    "llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight",
    "compressed-tensors": "global_compression_ratio kv_cache_scheme quantization_status version",
    "fbgemm_fp8": "activation_scale_ub",  # bounds what is rounded, which Ridgeline does not
    "fp8": "kv_cache_scheme",
    "mxfp4": "",
    "modelopt": "kv_cache_scheme",
}


def with_outer_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the `quantization_config` of its text_config at the top, where most have it.

    Kimi K2.5 keeps it there. Two that differ stay where they are.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping) or config.get(KEY) not in (None, {}, text.get(KEY)):
        return dict(config)
    quantization = text.get(KEY) or config.get(KEY)
    plain = {key: value for key, value in text.items() if key != KEY}
    return {**config, "text_config": plain, **({KEY: quantization} if quantization else {})}


def quantization_config_of(path: Path, config: Mapping[str, Any]) -> Any:
    """The `quantization_config` of a model directory; None if its weights are plain.

    config.json comes first, then the files in which older tools keep it.
    """
    if config.get(KEY) not in (None, {}):
        return config[KEY]
    if (path / _OLD_GPTQ).is_file():
        return {**read_json(path / _OLD_GPTQ), "quant_method": "gptq"}
    if (path / _MODELOPT).is_file():
        return {**read_json(path / _MODELOPT), "quant_method": "modelopt"}
    return None


def read_quantization_config(config: Any, where: str) -> QuantisedCheckpoint:
    """Parse a `quantization_config`. Raises BadModel if it is malformed or unsupported."""
    if not isinstance(config, Mapping):
        raise BadModel(f"{where}: quantization_config is not an object", fix=FIX)
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in _READERS:
        raise _refused(where, f"unknown quant_method {method!r}", ", ".join(_READERS))
    _check_keys(method, config, where)
    return _READERS[method](config, where)


def _check_keys(method: str, config: Mapping[str, Any], where: str) -> None:
    """Refuse keys that are neither understood nor harmless: ignoring them could change results."""
    if method not in _UNDERSTOOD:
        return  # torchao, which is refused
    known = {"quant_method", _RECIPE, *_UNDERSTOOD[method].split(), *_HARMLESS[method].split()}
    for key, value in config.items():
        if key not in known and value not in (None, {}, [], False):
            raise _refused(where, f"the key {key} of {method} is not understood: {value!r:.60}")


def _refused(where: str, what: str, limit: object = None) -> BadModel:
    return BadModel(f"{where}: {what} (quantization_config)", limit=limit, fix=FIX)


def _bits(config: Mapping[str, Any], where: str, known: tuple[int, ...]) -> int:
    bits = config.get("bits", config.get("w_bit", config.get("num_bits")))
    if not isinstance(bits, int) or bits not in known:
        raise _refused(where, f"cannot read {bits!r} bits", ", ".join(map(str, known)))
    return bits


def _group(config: Mapping[str, Any], where: str) -> int | None:
    group = config.get("group_size", config.get("q_group_size", -1))
    if group in (None, -1):
        return None
    if not isinstance(group, int) or group < 1:
        raise _refused(where, f"cannot read groups of {group!r}")
    return group


def _gptq(config: Mapping[str, Any], where: str) -> QuantisedCheckpoint:
    bits = _bits(config, where, (2, 3, 4, 8))
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise _refused(where, f"unknown checkpoint_format {layout!r}", "gptq, gptq_v2")
    if config.get("is_marlin_format"):
        raise _refused(where, "GPTQ in the layout of the Marlin kernels", "gptq, gptq_v2")
    symmetric = config.get("sym", True)
    base = QuantisedCheckpoint(
        codec="gptq",
        name=f"GPTQ {'v2' if layout == 'gptq_v2' else 'v1'}"
        + (", act-order" if config.get("desc_act") else ""),
        bits=bits,
        group_size=_group(config, where),
        zeros=not symmetric,
        version=2 if layout == "gptq_v2" else 1,
        ordered=bool(config.get("desc_act")),
    )
    return _with_rules(base, config, where)


def _with_rules(
    base: QuantisedCheckpoint, config: Mapping[str, Any], where: str
) -> QuantisedCheckpoint:
    """`base` with GPTQModel's `dynamic` rules: a pattern of module names to other settings.

    Rules that begin with "-:" leave modules unquantised, which their tensors show.
    """
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise _refused(where, f"cannot read the rules {rules!r:.60} (dynamic)")
    plain = {key: value for key, value in config.items() if key != "dynamic"}
    for settings in rules.values():
        if isinstance(settings, Mapping):
            _check_keys("gptq", settings, where)
    scopes = [
        (("re:" + str(pattern).removeprefix("+:"),), _gptq({**plain, **settings}, where))
        for pattern, settings in rules.items()
        if not str(pattern).startswith("-:") and isinstance(settings, Mapping) and settings
    ]
    if all(scope == base for _, scope in scopes):
        return base
    return replace(base, scopes=(*scopes, (("Linear",), base)))


def _auto_round(config: Mapping[str, Any], where: str) -> QuantisedCheckpoint:
    """AutoRound in the packing of GPTQ or AWQ."""
    packing = str(config.get("packing_format", "")).removeprefix("auto_round:")
    if packing not in ("auto_gptq", "auto_awq"):
        raise _refused(where, f"AutoRound in the packing {packing!r}", "auto_gptq, auto_awq")
    if config.get("data_type", "int") != "int":
        raise _refused(where, f"AutoRound with {config['data_type']!r} weights", "int")
    extra = config.get("extra_config") or {}
    if any(isinstance(own, Mapping) and own.get("bits", 16) < 16 for own in extra.values()):
        raise _refused(where, "AutoRound with other bits for some modules (extra_config)")
    plain = {key: config[key] for key in ("bits", "group_size", "sym") if key in config}
    if packing == "auto_gptq":
        return _gptq(plain, where)
    return _awq({**plain, "zero_point": not config.get("sym", True)}, where)


def _awq(config: Mapping[str, Any], where: str) -> QuantisedCheckpoint:
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        raise _refused(where, f"AWQ in the layout {version!r}", "gemm")
    zeros = config.get("zero_point", True)
    bits = _bits(config, where, (4,))
    return QuantisedCheckpoint(
        codec="awq", name="AWQ gemm", bits=bits, group_size=_group(config, where), zeros=bool(zeros)
    )


_COMPRESSED = {
    "pack-quantized": "int",
    "int-quantized": "int",
    "naive-quantized": None,
    "float-quantized": "float",
    "nvfp4-pack-quantized": "float",
    "mxfp4-pack-quantized": "float",
}


def _compressed(config: Mapping[str, Any], where: str) -> QuantisedCheckpoint:
    groups, sparsity = config.get("config_groups"), config.get("sparsity_config") or {}
    layout = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if layout == "sparse-24-bitmask" and not groups and not config.get("transform_config"):
        return QuantisedCheckpoint(
            codec=SPARSE, name="compressed-tensors sparse-24-bitmask", bits=16, integers=False
        )
    if not isinstance(groups, Mapping) or not groups:
        raise _refused(where, "compressed-tensors without config_groups")
    if sparsity and layout != "dense":
        raise _refused(
            where,
            f"quantised compressed-tensors with sparsity {sparsity!r:.80}",
            "dense; sparse-24-bitmask where nothing is quantised",
        )
    if config.get("transform_config"):
        raise _refused(where, "the inputs must be rotated while running (transform_config)")
    scopes = tuple(_scope(group, config.get("format"), where) for group in groups.values())
    first = scopes[0][1]
    if all(foreign == first for _, foreign in scopes):
        return first
    return replace(first, scopes=scopes)


def _scope(group: Any, layout: Any, where: str) -> tuple[tuple[str, ...], QuantisedCheckpoint]:
    """The targets of a config group, and how they are quantised."""
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise _refused(where, f"a config group with targets {targets!r}")
    _check_group(group, where)
    layout = group.get("format") or layout
    if layout not in _COMPRESSED:
        raise _refused(
            where, f"compressed-tensors in the format {layout!r}", ", ".join(_COMPRESSED)
        )
    return tuple(targets), _compressed_weights(group.get("weights"), layout, where)


_IN_GROUP = frozenset(("targets", "weights", "format", "input_activations"))
_OF_WEIGHTS = frozenset(
    # the second line says how scales were found, and dtypes that their tensors show
    """
    num_bits type strategy group_size symmetric actorder block_structure
    observer observer_kwargs zp_dtype scale_dtype
    """.split()  # noqa: SIM905
)


def _check_group(group: Mapping[str, Any], where: str) -> None:
    """Refuse what a config group says beyond how weights are stored: rounded outputs, for one."""
    weights = group.get("weights")
    for what, known, given in (
        ("a config group", _IN_GROUP, group),
        ("the weights of a config group", _OF_WEIGHTS, weights),
    ):
        for key, value in given.items() if isinstance(given, Mapping) else ():
            if key not in known and value not in (None, {}, [], False):
                raise _refused(where, f"the key {key} of {what} is not understood: {value!r:.60}")


def _compressed_weights(weights: Any, layout: str, where: str) -> QuantisedCheckpoint:
    if not isinstance(weights, Mapping):
        raise _refused(where, "compressed-tensors whose weights are not quantised")
    kind = weights.get("type", "int")
    if _COMPRESSED[layout] not in (None, kind):
        raise _refused(where, f"{layout} is declared to hold {kind} weights")
    if layout in _FP4:
        return _compressed_fp4(weights, layout, where)
    strategy, group = weights.get("strategy"), _group(weights, where)
    if strategy not in ("tensor", "channel", "group", "block"):
        raise _refused(where, f"scales per {strategy!r}", "tensor, channel, group, block")
    if strategy == "group" and group is None:
        raise _refused(where, "scales per group without a group_size")
    integers, block = kind == "int", _block(weights.get("block_structure"), where)
    known = (2, 3, 4, 5, 6, 7, 8) if layout == "pack-quantized" else (8,)
    return QuantisedCheckpoint(
        codec="compressed_packed" if layout == "pack-quantized" else "scaled",
        name=f"compressed-tensors {layout}",
        bits=_bits(weights, where, known),
        group_size=group if strategy == "group" else None,
        zeros=not weights.get("symmetric", True),
        integers=integers,
        block=block,
        ordered=weights.get("actorder") in ("group", True),
    )


NV_GROUP, _MX_GROUP = 16, 32
_FP4 = {"nvfp4-pack-quantized": NV_GROUP, "mxfp4-pack-quantized": _MX_GROUP}
"""The layouts of 4-bit floats, and how many inputs share a scale."""


def _compressed_fp4(weights: Mapping[str, Any], layout: str, where: str) -> QuantisedCheckpoint:
    if weights.get("group_size", _FP4[layout]) != _FP4[layout]:
        raise _refused(where, f"{layout} in groups of {weights['group_size']}", _FP4[layout])
    if not weights.get("symmetric", True):
        raise _refused(where, f"{layout} with zero-points")
    _bits(weights, where, (4,))
    return _fp4("fp4", f"compressed-tensors {layout}", _FP4[layout])


def _fp4(codec: str, name: str, group_size: int) -> QuantisedCheckpoint:
    """4-bit floats: whole numbers of 5 bits times half their scale. The scales of MXFP4 are powers
    of two, which the packed formats hold; those of NVFP4 are decoded to float32."""
    return QuantisedCheckpoint(
        codec=codec, name=name, bits=5, group_size=group_size, integers=group_size == _MX_GROUP
    )


def _modelopt(config: Mapping[str, Any], where: str) -> QuantisedCheckpoint:
    """NVIDIA's Model Optimizer: the algorithm lies under `quantization` in its own file."""
    inner = config.get("quantization", config)
    algorithm = inner.get("quant_algo") if isinstance(inner, Mapping) else None
    if algorithm == "FP8":
        return QuantisedCheckpoint(codec="scaled", name="modelopt FP8", bits=8, integers=False)
    if algorithm == "NVFP4" and inner.get("group_size", NV_GROUP) == NV_GROUP:
        return _fp4("fp4", "modelopt NVFP4", NV_GROUP)
    raise _refused(where, f"modelopt with the algorithm {algorithm!r}", "FP8, NVFP4")


def _fp8(config: Mapping[str, Any], where: str) -> QuantisedCheckpoint:
    form = config.get("fmt", "e4m3")
    if form not in ("e4m3", "float8_e4m3fn"):
        raise _refused(where, f"FP8 in the format {form!r}", "e4m3")
    block = _block(config.get("weight_block_size"), where)
    return QuantisedCheckpoint(codec="scaled", name="FP8 e4m3", bits=8, integers=False, block=block)


def _block(config: Any, where: str) -> tuple[int, int]:
    if config is None:
        return (128, 128)
    if not isinstance(config, list) or not all(isinstance(n, int) and n > 0 for n in config):
        raise _refused(where, f"cannot read blocks of {config!r}")
    if len(config) != 2:
        raise _refused(where, f"cannot read blocks of {config!r}")
    return (config[0], config[1])


def _fbgemm(config: Mapping[str, Any], where: str) -> QuantisedCheckpoint:
    """FP8 with a scale per output, as Llama 3.1 405B was published."""
    return QuantisedCheckpoint(codec="scaled", name="FP8 (fbgemm)", bits=8, integers=False)


def _bitsandbytes(config: Mapping[str, Any], where: str) -> QuantisedCheckpoint:
    if config.get("load_in_8bit") and config.get("load_in_4bit"):
        raise _refused(where, "bitsandbytes with both load_in_8bit and load_in_4bit")
    if config.get("load_in_8bit"):
        threshold = config.get("llm_int8_threshold", 6.0)
        if not isinstance(threshold, int | float) or not 0 <= threshold < inf:
            raise _refused(where, f"cannot read the threshold {threshold!r}", "0 or more")
        name = "bitsandbytes LLM.int8"
        return QuantisedCheckpoint(codec="bnb8", name=name, bits=8, threshold=float(threshold))
    kind = config.get("bnb_4bit_quant_type", "fp4")
    if not config.get("load_in_4bit") or kind not in ("nf4", "fp4"):
        raise _refused(where, f"bitsandbytes {kind!r}", "nf4, fp4, int8")
    return QuantisedCheckpoint(codec="bnb4", name=f"bitsandbytes {kind}", bits=4, integers=False)


def _mxfp4(config: Mapping[str, Any], where: str) -> QuantisedCheckpoint:
    return _fp4("mxfp4", "MXFP4 experts", _MX_GROUP)


def _torchao(config: Mapping[str, Any], where: str) -> QuantisedCheckpoint:
    raise _refused(
        where,
        "torchao checkpoints contain classes of that package, whose layout on disk is not stable",
        "a checkpoint of another method",
    )


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], QuantisedCheckpoint]] = {
    "gptq": _gptq,
    "auto-round": _auto_round,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "torchao": _torchao,
}
