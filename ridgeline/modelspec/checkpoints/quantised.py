"""A quantised checkpoint of another tool: its record, and the formats that its weights run in.

`ridgeline.modelspec.checkpoints.quantization_config` makes the record from config.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import msgspec
from msgspec.structs import replace

from ridgeline.errors import BadModel
from ridgeline.modelspec.format import Format, dense, format_for
from ridgeline.modelspec.model import LinearSpec, ModelSpec
from ridgeline.modelspec.rewrite import linears, map_linears

FIX = "use the unquantised checkpoint, or one in a format that docs/guides/quantise/index.md lists"


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
        raise BadModel("no group of the quantization_config names a module", value=module, fix=FIX)

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


MARKS = (
    ".qweight",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".SCB",
    "_blocks",
    ".bitmask",
)
"""Suffixes of tensor names that mark a quantised module (bitsandbytes 4-bit: `_STATE`)."""
SPARSE = "sparse24"
"""The codec of weights that are sparse and otherwise as the dtype of the checkpoint stores them."""
_STATE = ".weight.quant_state.bitsandbytes__"
_MODULES = {
    "attention.q": ("self_attn.q_proj", "self_attn.qkv_proj", "self_attn.q_b_proj"),
    "attention.q_down": ("self_attn.q_a_proj",),
    "attention.kv_down": ("self_attn.kv_a_proj_with_mqa",),
    "kv_up.k": ("self_attn.kv_b_proj",),
    "kv_up.v": ("self_attn.kv_b_proj",),
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
    "mlp.shared_gate": ("mlp.shared_expert*.gate_proj",),
    "mlp.shared_up": ("mlp.shared_expert*.up_proj",),
    "mlp.shared_down": ("mlp.shared_expert*.down_proj",),
    "router": ("mlp.gate", "block_sparse_moe.gate"),
    "shared_router": ("mlp.shared_expert_gate",),
}
_MODULES_NEXT_TO_EXPERTS = {
    **{f"mlp.{key}": (f"experts.*.{key}_proj",) for key in ("gate", "up", "down")},
    **{f"mlp.shared_{key}": (f"mlp.{key}_proj",) for key in ("gate", "up", "down")},
    "router": ("router.proj",),
}
"""Where a dense MLP stands next to the experts (Gemma 4)."""


_MODULES_OF_DELTA_NETS: dict[str, tuple[str, ...]] = {
    **{
        f"attention.{key}": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz")
        for key in ("q", "k", "v")
    },
    "attention.z": ("linear_attn.in_proj_z", "linear_attn.in_proj_qkvz"),
    "attention.o": ("linear_attn.out_proj",),
    "delta_b": (),
    "delta_a": (),
}
"""The small gates b and a have no module here: where they are quantised, they are dequantised."""


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
    if foreign.codec == SPARSE:
        line = f"{len(modules)} modules: {foreign.name}, dense in memory"
        return replace(spec, rewrites=(*spec.rewrites, line))
    wide = any(
        dtype == "F32" and name.endswith((".scales", ".weight_scale"))
        for name, dtype in tensors.items()
    )
    chosen = {
        path: foreign.at(module).format(linear.num_in, wide)
        for path, linear in linears(spec).items()
        for module in _near(modules, path)
        if _is(module, path, spec)
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


def _is(module: str, path: str, spec: ModelSpec) -> bool:
    if path == "lm_head":
        return module == "lm_head" or module.endswith(".lm_head")
    _, index, key = path.split(".", 2)
    layer, names = spec.layers[int(index)], _MODULES
    if layer.mlp.own_norms:
        names = names | _MODULES_NEXT_TO_EXPERTS
    if layer.attention.delta is not None:
        names = names | _MODULES_OF_DELTA_NETS
    wanted = names[key]
    inner = module.split(f"layers.{index}.", 1)[1]
    return any(inner == name or fnmatchcase(inner, name) for name in wanted)


def describe(foreign: QuantisedCheckpoint, formats: Iterable[Format]) -> str:
    """One line for the user: the checkpoint's format, its grid, and how it is computed."""
    if foreign.scopes:
        kinds = sorted({format.kind for format in formats})
        widths = ", ".join(f"{scope.bits} bits ({scope.name})" for _, scope in foreign.scopes)
        return f"several widths: {widths}; run as {', '.join(kinds)}"
    group = "row" if foreign.group_size is None else f"group of {foreign.group_size}"
    zeros = ", zero-points" if foreign.zeros else ""
    # 4-bit floats run as whole numbers of `bits` bits, which is not how they are stored
    width = "4-bit floats" if "fp4" in foreign.codec else f"{foreign.bits} bits"
    grid = f"{width}, a scale per {group}{zeros}" if foreign.integers else width
    kinds = sorted({format.kind for format in formats})
    how = "decoded to float32"
    if kinds != ["dense"]:
        how = (
            f"run as {', '.join(kinds)}: weights exactly, "
            "activations in int8 unless --activations says otherwise"
        )
    if foreign.threshold:
        how += f"; inputs of magnitude {foreign.threshold:g} or more multiplied as floats"
    return f"{foreign.name} ({grid}), {how}"
