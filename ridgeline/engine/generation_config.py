"""The sampling parameters that a model's publisher recommends.

They come from its generation_config.json or GGUF metadata, or from our table of registry models.

As in vLLM they are the defaults of requests that leave them out (`--generation-config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput, BadModel, UserError
from ridgeline.hub.registry_models import registry_models
from ridgeline.modelspec.checkpoints.gguf_header import is_gguf, read_gguf
from ridgeline.modelspec.checkpoints.json_files import file_errors, read_json
from ridgeline.modelspec.checkpoints.locate import is_dummy, model_path
from ridgeline.records import SamplingDefaults

FILE = "generation_config.json"
_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_GGUF_START = "general.sampling."
_GGUF_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_FIX = "use --generation-config vllm, which ignores the model's sampling defaults"


@file_errors()
def read_sampling_defaults(model: str, generation_config: str = "auto") -> SamplingDefaults:
    """The defaults that `--generation-config` names.

    "auto": those of the model, "vllm": none, otherwise those of a file or of the folder that holds
    it. Raises BadModel for values out of range, BadInput for a path without the file.
    """
    if generation_config == "vllm":
        return SamplingDefaults()
    if generation_config != "auto":
        path = Path(generation_config).expanduser()
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise BadInput(
                "--generation-config is neither auto, vllm nor a place that holds the file",
                value=generation_config,
                limit=FILE,
                fix="name a folder that holds one",
            )
        return _defaults(read_json(file), _NAMES, str(file))
    if is_dummy(model):
        return SamplingDefaults()
    if model in registry_models():
        row = registry_models()[model]
        return SamplingDefaults(temperature=row.temperature, top_p=row.top_p)
    if is_gguf(model):
        start = len(_GGUF_START)
        metadata = read_gguf(model).metadata
        values = {k[start:]: v for k, v in metadata.items() if k.startswith(_GGUF_START)}
        return _defaults(values, _GGUF_NAMES, model)
    file = model_path(model) / FILE
    return _defaults(read_json(file), _NAMES, str(file)) if file.is_file() else SamplingDefaults()


def _defaults(values: Mapping[str, Any], names: Mapping[str, str], where: str) -> SamplingDefaults:
    named = {own: values[name] for name, own in names.items() if values.get(name) is not None}
    try:
        return msgspec.convert(named, SamplingDefaults)
    except (*DECODE_ERRORS, UserError) as error:
        raise BadModel(
            "a sampling default of the model cannot be used",
            value=str(error),
            limit=where,
            fix=_FIX,
        ) from None
