"""What layers have beyond attention and MLP: separate inputs, shared caches, several states."""

from __future__ import annotations

from ridgeline.errors import CannotRun
from ridgeline.modelspec.format import dense
from ridgeline.modelspec.model import LinearSpec, ModelSpec

MAX_STREAMS = 16
"""Hidden states of a layer (Gemma 3n has 4)."""


def why_torch_only(spec: ModelSpec) -> str:
    """What only the torch layers compute, and no rewrite of weights knows; "" if nothing."""
    layers = spec.layers
    checks = {
        "layers have separate inputs": any(layer.layer_input for layer in layers),
        "layers carry several hidden states (AltUp)": any(layer.altup for layer in layers),
        "layers scale their output": any(layer.output_scale for layer in layers),
        "layers share KV caches": any(layer.attention.shares_kv for layer in layers),
        "values are normalised": any(layer.attention.v_norm for layer in layers),
        "experts have separate norms": any(layer.mlp.own_norms for layer in layers),
        "gates are sparse": any(layer.mlp.sparsity for layer in layers),
    }
    return ", ".join(reason for reason, holds in checks.items() if holds)


def refuse_special_layers(spec: ModelSpec, what: str, fix: str | None = None) -> None:
    """Raise CannotRun if `what` ("quantize") does not know what the model's layers have."""
    reason = why_torch_only(spec)
    if reason:
        raise CannotRun(f"{what} does not know this model: {reason}", value=spec.family, fix=fix)


def kv_source(spec: ModelSpec, index: int) -> int:
    """The layer whose KV cache the layer reads: its own number unless it shares one."""
    attention = spec.layers[index].attention
    if not attention.shares_kv:
        return index
    return next(
        i
        for i in reversed(range(index))
        if not spec.layers[i].attention.shares_kv
        and spec.layers[i].attention.window == attention.window
    )


def model_linears(spec: ModelSpec) -> dict[str, LinearSpec]:
    """The linears around the layers, by key: those that make layer inputs and hidden states.

    They are stored as the checkpoint has them.
    """
    if not spec.layers:
        return {}
    first, fmt = spec.layers[0], dense(spec.dtype)
    size, found = spec.hidden_size, {}
    if first.layer_input is not None:
        rows = len(spec.layers) * first.layer_input.size
        found["input_projection"] = LinearSpec(num_out=rows, num_in=size, format=fmt)
    if first.altup is not None:
        for i in range(first.altup.num_streams - 1):
            for key in ("stream", "unstream"):
                found[f"{key}{i}"] = LinearSpec(num_out=size, num_in=size, format=fmt)
    return found


def input_table_params(spec: ModelSpec) -> int:
    """Entries of the table of layer inputs."""
    inputs = spec.layers[0].layer_input if spec.layers else None
    return 0 if inputs is None else inputs.vocab_size * len(spec.layers) * inputs.size
