"""Bytes of a spec's weights in the spec's own formats."""

from __future__ import annotations

from ridgeline.modelspec.cost.step import cost_model
from ridgeline.modelspec.format import BYTES_OF_DTYPE
from ridgeline.modelspec.layer_inputs import input_table_params
from ridgeline.modelspec.model import ModelSpec


def weight_bytes(spec: ModelSpec, num_tokens: int | None = None) -> float:
    """Bytes of weights read by a decode step: everything except an untied embedding table.

    `num_tokens`: tokens in the step, which decides how many experts are read (None: all of them).
    """
    model = cost_model(spec)
    total = model.fixed_weight_bytes + model.head_weight_bytes
    for group in model.experts:
        everything = group.num_experts * group.expert_bytes
        total += everything if num_tokens is None else group.expected_bytes(num_tokens)
    return total


def resident_weight_bytes(spec: ModelSpec) -> float:
    """Bytes of weights in memory, including the embedding table unless the LM head shares it."""
    table = 0 if shares_table(spec) else table_bytes(spec)
    return weight_bytes(spec) + _input_table_bytes(spec) + table


def _input_table_bytes(spec: ModelSpec) -> float:
    """Bytes of the table of layer inputs; 0 if there is none."""
    inputs = spec.layers[0].layer_input if spec.layers else None
    if inputs is None or inputs.table_format is None:
        return input_table_params(spec) * BYTES_OF_DTYPE[spec.stored_dtype]
    return inputs.table_format.nbytes(inputs.vocab_size, len(spec.layers) * inputs.size)


def shares_table(spec: ModelSpec) -> bool:
    """True if embedding and LM head share one table in memory: both dense, or packed alike."""
    head = spec.lm_head.format
    alike = head.kind == "dense" if spec.embed_format is None else head.stored == spec.embed_format
    return spec.tied_embeddings and alike


def table_bytes(spec: ModelSpec) -> float:
    """Bytes of the embedding table in memory."""
    if spec.embed_format is not None:
        return spec.embed_format.nbytes(spec.vocab_size, spec.hidden_size)
    return spec.vocab_size * spec.hidden_size * BYTES_OF_DTYPE[table_dtype(spec)]


def table_dtype(spec: ModelSpec) -> str:
    """The dtype of a plain embedding table.

    A table stored in bfloat16 stays in bfloat16 (rows are widened when they are read, which is
    exact) unless a dense LM head shares it.
    """
    keeps_dtype = spec.stored_dtype == "bfloat16" and not shares_table(spec)
    return spec.stored_dtype if keeps_dtype else spec.dtype
