"""Reads the `quantization_config` of checkpoints quantised by other tools.

Unknown or contradictory configs are rejected with the reason; the tensors are checked when they are
read (`ridgeline.engine.checkpoints`).

| `quant_method` | supported |
|---|---|
| gptq | 2, 3, 4, 8 bits, v1 and v2 zero-points, act-order |
| awq | the GEMM layout, 4 bits |
| compressed-tensors | pack-quantized, int-quantized, naive-quantized, float-quantized |
| fp8 | e4m3 in blocks (`weight_scale_inv`) or with one scale per tensor |
| bitsandbytes | nf4 and fp4 (double quantisation too), LLM.int8 |
| mxfp4 | the experts of gpt-oss |
| torchao | none: rejected with the reason |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from math import inf
from typing import Any

import msgspec
from msgspec.structs import replace

from ridgeline.errors import BadModel
from ridgeline.modelspec.format import Format, dense, format_for
from ridgeline.modelspec.model import LinearSpec, ModelSpec
from ridgeline.modelspec.rewrite import linears, map_linears

_FIX = "use the unquantised checkpoint, or one in a format that docs/guides/quantise/index.md lists"


class QuantisedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint is quantised.

    `codec` selects the reader; `name` is the display name. `group_size` None: one scale per output
    (or per tensor). `integers`: weights are integers times scales, else floats or table entries.
    `block`: (outputs, inputs) that share a scale, if scales are per block. `ordered`: the inputs of
    a group need not be adjacent (act-order). `scopes`, if modules differ: targets (module names,
    "re:" patterns, "Linear" for all others) and how each is quantised; the other fields then repeat
    the first scope. `threshold`: inputs of at least this magnitude are multiplied as floats
    (LLM.int8).
    """

    codec: str
    name: str
    bits: int
    group_size: int | None = None
    zeros: bool = False
    integers: bool = True
    version: int = 1
    block: tuple[int, int] = (128, 128)
    ordered: bool = False
    threshold: float = 0.0
    scopes: tuple[tuple[tuple[str, ...], QuantisedCheckpoint], ...] = ()

    def at(self, module: str) -> QuantisedCheckpoint:
        """How one module is quantised. Raises BadModel if no scope names it."""
        if not self.scopes:
            return self
        for matches in (lambda t: _names_module(t, module), lambda t: t == "Linear"):
            for targets, foreign in self.scopes:
                if any(matches(target) for target in targets):
                    return foreign
        raise BadModel("no group of the quantization_config names a module", value=module, fix=_FIX)

    def format(self, num_in: int, wide_scales: bool = False) -> Format:
        """The format in which a linear with `num_in` inputs is computed.

        `wide_scales`: scales are float32, which the packed formats with groups cannot hold.
        """
        if not self.integers:
            return dense("float32")
        format = format_for(self.bits, self.group_size or num_in, num_in, self.zeros)
        if wide_scales and format.group_size:
            return dense("float32")
        threshold = self.threshold if format.kind == "int8" else 0.0
        ordered = self.ordered and format.group_size is not None
        return replace(format, ordered=ordered, threshold=threshold)


def _names_module(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def read_quantization_config(config: Any, where: str) -> QuantisedCheckpoint:
    """Parse a `quantization_config`. Raises BadModel if it is malformed or unsupported."""
    if not isinstance(config, Mapping):
        raise BadModel(f"{where}: quantization_config is not an object", fix=_FIX)
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in _READERS:
        raise _refused(where, f"unknown quant_method {method!r}", ", ".join(_READERS))
    return _READERS[method](config, where)


def _refused(where: str, what: str, limit: object = None) -> BadModel:
    return BadModel(f"{where}: {what} (quantization_config)", limit=limit, fix=_FIX)


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
    layout = config.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise _refused(where, f"unknown checkpoint_format {layout!r}", "gptq, gptq_v2")
    if config.get("dynamic"):
        raise _refused(where, "GPTQ with different settings per module (dynamic)")
    symmetric = config.get("sym", True)
    return QuantisedCheckpoint(
        codec="gptq",
        name=f"GPTQ {'v2' if layout == 'gptq_v2' else 'v1'}"
        + (", act-order" if config.get("desc_act") else ""),
        bits=bits,
        group_size=_group(config, where),
        zeros=not symmetric,
        version=2 if layout == "gptq_v2" else 1,
        ordered=bool(config.get("desc_act")),
    )


def _awq(config: Mapping[str, Any], where: str) -> QuantisedCheckpoint:
    version = str(config.get("version", "gemm")).lower()
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
}


def _compressed(config: Mapping[str, Any], where: str) -> QuantisedCheckpoint:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused(where, "compressed-tensors without config_groups")
    if config.get("sparsity_config"):
        raise _refused(where, "compressed-tensors with sparsity")
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
    layout = group.get("format") or layout
    if layout not in _COMPRESSED:
        raise _refused(
            where, f"compressed-tensors in the format {layout!r}", ", ".join(_COMPRESSED)
        )
    return tuple(targets), _compressed_weights(group.get("weights"), layout, where)


def _compressed_weights(weights: Any, layout: str, where: str) -> QuantisedCheckpoint:
    if not isinstance(weights, Mapping):
        raise _refused(where, "compressed-tensors whose weights are not quantised")
    kind = weights.get("type", "int")
    if _COMPRESSED[layout] not in (None, kind):
        raise _refused(where, f"{layout} is declared to hold {kind} weights")
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


def _bitsandbytes(config: Mapping[str, Any], where: str) -> QuantisedCheckpoint:
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
    # e2m1 numbers are 5-bit integers times half their scale
    return QuantisedCheckpoint(codec="mxfp4", name="MXFP4 experts", bits=5, group_size=32)


def _torchao(config: Mapping[str, Any], where: str) -> QuantisedCheckpoint:
    raise _refused(
        where,
        "torchao checkpoints contain classes of that package, whose layout on disk is not stable",
        "a checkpoint of another method",
    )


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], QuantisedCheckpoint]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "torchao": _torchao,
}

MARKS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".SCB", "_blocks")
"""Suffixes of tensor names that mark a quantised module (bitsandbytes 4-bit: `_STATE`)."""
_STATE = ".weight.quant_state.bitsandbytes__"
_MODULES = {
    "attention.q": ("self_attn.q_proj", "self_attn.qkv_proj"),
    "attention.k": ("self_attn.k_proj", "self_attn.qkv_proj"),
    "attention.v": ("self_attn.v_proj", "self_attn.qkv_proj"),
    "attention.o": ("self_attn.o_proj",),
    "mlp.gate": (
        "mlp.gate_proj",
        "mlp.gate_up_proj",
        "*.experts.*.gate_proj",
        "*.experts.*.w1",
        "mlp.experts.gate_up_proj",
    ),
    "mlp.up": (
        "mlp.up_proj",
        "mlp.gate_up_proj",
        "*.experts.*.up_proj",
        "*.experts.*.w3",
        "mlp.experts.gate_up_proj",
    ),
    "mlp.down": (
        "mlp.down_proj",
        "*.experts.*.down_proj",
        "*.experts.*.w2",
        "mlp.experts.down_proj",
    ),
    "router": ("mlp.gate", "block_sparse_moe.gate"),
}


def module_of(tensor: str) -> str | None:
    """The quantised module to which a tensor belongs; None if its name does not mark one."""
    for mark in MARKS:
        if tensor.endswith(mark):
            return tensor.removesuffix(mark)
    at = tensor.find(_STATE)
    return None if at < 0 else tensor[:at]


def with_quantised_formats(
    spec: ModelSpec, foreign: QuantisedCheckpoint, tensors: Mapping[str, str], where: str
) -> ModelSpec:
    """`spec` with the formats in which the checkpoint's quantised weights are computed.

    `tensors`: the dtype of every tensor by name. Raises BadModel if no tensor is quantised.
    """
    modules = {module for name in tensors if (module := module_of(name)) is not None}
    if not modules:
        raise BadModel(
            f"{where}: config.json declares {foreign.name}, but no tensor is quantised",
            fix="check that config.json belongs to these weights",
        )
    wide = any(
        dtype == "F32" and name.endswith((".scales", ".weight_scale"))
        for name, dtype in tensors.items()
    )
    chosen = {
        path: foreign.at(module).format(linear.num_in, wide)
        for path, linear in linears(spec).items()
        for module in _near(modules, path)
        if _is(module, path)
    }

    def on_linear(path: str, linear: LinearSpec) -> LinearSpec:
        return replace(linear, format=chosen.get(path, linear.format))

    line = f"{len(chosen)} linears: {describe(foreign, chosen.values())}"
    return replace(map_linears(spec, on_linear), rewrites=(*spec.rewrites, line))


def _near(modules: Iterable[str], path: str) -> list[str]:
    if not path.startswith("layers."):
        return [module for module in modules if module.endswith("lm_head")]
    layer = f"layers.{path.split('.')[1]}."
    return [module for module in modules if layer in module]


def _is(module: str, path: str) -> bool:
    if path == "lm_head":
        return module == "lm_head" or module.endswith(".lm_head")
    wanted = _MODULES[path.split(".", 2)[2]]
    inner = module.split(f"layers.{path.split('.')[1]}.", 1)[1]
    return any(inner == name or fnmatchcase(inner, name) for name in wanted)


def describe(foreign: QuantisedCheckpoint, formats: Iterable[Format]) -> str:
    """One line for the user: the checkpoint's format, its grid, and how it is computed."""
    if foreign.scopes:
        kinds = sorted({format.kind for format in formats})
        widths = ", ".join(f"{scope.bits} bits ({scope.name})" for _, scope in foreign.scopes)
        return f"several widths: {widths}; run as {', '.join(kinds)}"
    group = "row" if foreign.group_size is None else f"group of {foreign.group_size}"
    zeros = ", zero-points" if foreign.zeros else ""
    grid = f"{foreign.bits} bits, a scale per {group}{zeros}" if foreign.integers else "table"
    kinds = sorted({format.kind for format in formats})
    how = "decoded to float32" if kinds == ["dense"] else f"run as {', '.join(kinds)}, exactly"
    if foreign.threshold:
        how += f"; inputs of magnitude {foreign.threshold:g} or more multiplied as floats"
    return f"{foreign.name} ({grid if foreign.integers else f'{foreign.bits} bits'}), {how}"
