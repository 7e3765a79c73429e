"""What a server's configuration file gives.

The YAML of trtllm-serve's `--config` has keys as in TorchLlmArgs of TensorRT-LLM's LLM API
reference, and takes precedence over the flags, as there. That of vLLM and SGLang has flags, which
stand before those of the command line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ridgeline.errors import DECODE_ERRORS, BadInput
from ridgeline.twin.servers.flag_table import FlagTable

_FIELDS = {
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
    "tensor_parallel_size": "tp",
    "moe_expert_parallel_size": "ep",
    "enable_chunked_prefill": "chunked_prefill",
    "kv_cache_config.dtype": "kv_cache_dtype",
    "kv_cache_config.free_gpu_memory_fraction": "memory_share",
    "kv_cache_config.enable_block_reuse": "prefix_caching",
    "speculative_config.decoding_type": "speculation",
    "speculative_config.max_draft_len": "num_drafts",
    "speculative_config.num_nextn_predict_layers": "num_drafts",
}
_GRAPHS, _NO_OVERLAP = "cuda_graph_config", "disable_overlap_scheduler"
_MAX_BYTES = 1 << 20


def read_config_file(path: str) -> tuple[dict[str, Any], list[str]]:
    """The fields of `ServerLine` that a file sets, and its keys without an effect on a twin.

    A file that cannot be read sets nothing, and is named among the latter: it may be where the
    server runs.
    """
    document = _document(path)
    if document is None:
        return {}, [path]
    fields: dict[str, Any] = {}
    unknown = []
    if _GRAPHS in document:
        fields["graphs"] = document.pop(_GRAPHS) is not None
    if _NO_OVERLAP in document:
        fields["overlapped"] = not document.pop(_NO_OVERLAP)
    for key, value in _leaves(document):
        if key in _FIELDS:
            fields[_FIELDS[key]] = value
        else:
            unknown.append(f"{key} in {path}")
    return fields, unknown


def take_config_flags(words: Sequence[str], table: FlagTable) -> tuple[list[str], list[str]]:
    """The flags of the file that `--config` names, if the server reads such files, and the words
    without `--config`. Raises BadInput for a value that is no flag's.

    A file that cannot be read gives none, and is still named in the words.
    """
    words = list(words)
    if table.parser != "argparse" or "--config" not in words[:-1]:
        return [], words
    place = words.index("--config")
    path = words[place + 1]
    document = _document(path)
    if document is None:
        return [], words
    flags: list[str] = []
    for key, value in document.items():
        flags += _flag(path, str(key), value, table)
    return flags, [*words[:place], *words[place + 2 :]]


def _flag(path: str, key: str, value: Any, table: FlagTable) -> list[str]:
    name = key.replace("_", "-")
    flag, opposite = f"--{name}", f"--no-{name}"
    if isinstance(value, bool):
        return [flag] if value else [opposite] if opposite in table.takes else []
    if isinstance(value, list):
        return [flag, *map(str, value)] if value else []
    if not isinstance(value, dict):
        return [flag, str(value)]
    try:
        return [flag, json.dumps(value)]
    except (TypeError, *DECODE_ERRORS) as error:
        raise BadInput(
            f"{key} in {path} cannot be passed on as JSON",
            value=str(error),
            fix="quote dates, and do not let an alias refer to the object that contains it",
        ) from None


def _document(path: str) -> dict[str, Any] | None:
    """The table in a file of YAML; None if there is none that can be read."""
    try:
        if Path(path).stat().st_size > _MAX_BYTES:
            return None
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, *DECODE_ERRORS):
        return None
    return document if isinstance(document, dict) else None


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """`a.b` → value, of tables of at most one level."""
    for key, value in document.items():
        if isinstance(value, dict):
            for name, inner in value.items():
                yield f"{key}.{name}", inner
        elif value is not None:
            yield str(key), value
