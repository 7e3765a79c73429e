"""Loads the spec of a model named by a directory, a GGUF file, "demo" or `dummy:NAME`."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_header import is_gguf
from ridgeline.modelspec.checkpoints.gguf_spec import gguf_spec
from ridgeline.modelspec.checkpoints.json_files import file_errors, read_json
from ridgeline.modelspec.checkpoints.locate import dummy_shape, is_dummy, model_path
from ridgeline.modelspec.checkpoints.packed_config import KEY, packed_formats, with_packed_formats
from ridgeline.modelspec.checkpoints.quantised import with_quantised_formats
from ridgeline.modelspec.checkpoints.quantization_config import (
    quantization_config_of,
    read_quantization_config,
    with_outer_quantization,
)
from ridgeline.modelspec.checkpoints.safetensors_header import (
    dtype_of_weights,
    dtypes_of,
    has_own_head,
)
from ridgeline.modelspec.checkpoints.special_tokens import tokenizer_eos_ids
from ridgeline.modelspec.families.build import eos_in_vocabulary
from ridgeline.modelspec.families.registry import spec_from_config
from ridgeline.modelspec.families.shapes import shape_config
from ridgeline.modelspec.model import ModelSpec


@file_errors()
def load_spec(model: str) -> ModelSpec:
    """The spec of a model directory, a GGUF file, "demo", or `dummy:NAME`. Raises BadModel.

    The end-of-sequence tokens are those of config.json, generation_config.json and the tokenizer.
    If the config names no dtype, the first weight file decides. An LM head that differs from the
    embeddings is used even if the config ties the two.
    """
    if is_dummy(model):
        return spec_from_config(shape_config(dummy_shape(model)), name=model)
    if is_gguf(model):
        return gguf_spec(model)
    path = model_path(model)
    config = with_outer_quantization(read_json(path / "config.json"))
    if config.get("dtype") is None and config.get("torch_dtype") is None:
        config["dtype"] = dtype_of_weights(path)
    formats = packed_formats(config, model)
    quantization = quantization_config_of(path, config)
    config.pop(KEY, None)
    spec = spec_from_config(config, name=model)
    spec = replace(spec, eos_token_ids=_all_eos(spec, path))
    if spec.tied_embeddings and has_own_head(path):
        spec = replace(spec, tied_embeddings=False)
    if formats is not None:
        return with_packed_formats(spec, formats, model)
    if quantization is None:
        return spec
    foreign = read_quantization_config(quantization, model)
    return with_quantised_formats(spec, foreign, dtypes_of(path), model)


def _all_eos(spec: ModelSpec, path: Path) -> tuple[int, ...]:
    """The ends of config.json, of generation_config.json and of the tokenizer together.

    A chat model often ends its turns with a token that only one of the latter two names.
    """
    generation = path / "generation_config.json"
    more = read_json(generation).get("eos_token_id") if generation.is_file() else None
    ids = more if isinstance(more, list) else [] if more is None else [more]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise BadModel("eos_token_id is not a token id", value=more, limit=str(generation))
    everything = (*spec.eos_token_ids, *ids, *tokenizer_eos_ids(path))
    return eos_in_vocabulary(everything, spec.vocab_size)
