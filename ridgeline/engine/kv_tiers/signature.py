"""What stored blocks depend on besides their tokens: two caches with equal signatures may share.

Weights count by their content, so a fine-tuned model with the same shapes never reads the blocks of
its base. So do formats and the order of tiles, the kernels (their sums are exact within one set of
instructions only), and the versions that computed the block.
"""

from __future__ import annotations

import os
from hashlib import blake2b, file_digest
from pathlib import Path

import msgspec
import torch

import ridgeline
from ridgeline._native import best_isa
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.config import ResolvedSettings
from ridgeline.errors import DECODE_ERRORS
from ridgeline.modelspec.checkpoints.locate import is_dummy, local_path

VERSION = 1
_SUFFIXES = (".safetensors", ".gguf", ".json")
_MEMO = "weights.json"


def cache_signature(resolved: ResolvedSettings, kv: KvCache, memo: Path | None) -> str:
    """Hex digest of everything that a block's bytes depend on besides its tokens and tenant.

    `memo`: a directory that remembers the digests of weight files by their time of change.
    """
    parts = (
        VERSION,
        ridgeline.__version__,
        torch.__version__,
        best_isa(),
        torch.device(resolved.device).type,
        weights_digest(resolved, memo),
        msgspec.json.encode(resolved.spec).hex(),
        resolved.block_size,
        resolved.dtype,
        resolved.attention_backend,
        resolved.layer_backend,
        kv.format.name,
        str(kv.format.dtype),
        msgspec.json.encode(kv.layout).hex(),
        [tuple(tensor.shape[1:]) for tensor in kv.tensors],
    )
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def weights_digest(resolved: ResolvedSettings, memo: Path | None) -> str:
    """Hex digest of the model's weight files; of name and seed for random weights."""
    if is_dummy(resolved.model):
        return f"{resolved.model} {resolved.seed}"
    path = local_path(resolved.model)
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    known = _read_memo(memo)
    digests = {}
    for file in files:
        stat = file.stat()
        name = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
        digests[name] = known.get(name) or _digest(file)
    if memo is not None and not digests.items() <= known.items():
        _write_memo(memo, known | digests)
    return blake2b("".join(digests.values()).encode(), digest_size=16).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, lambda: blake2b(digest_size=16)).hexdigest()


def _read_memo(memo: Path | None) -> dict[str, str]:
    if memo is None:
        return {}
    try:
        return msgspec.json.decode((memo / _MEMO).read_bytes(), type=dict[str, str])
    except (OSError, *DECODE_ERRORS):
        return {}


def _write_memo(memo: Path, digests: dict[str, str]) -> None:
    temporary = memo / f"{_MEMO}.{os.getpid()}.tmp"
    try:
        temporary.write_bytes(msgspec.json.encode(digests))
        temporary.replace(memo / _MEMO)
    except OSError:  # only the time to compute them again is lost
        temporary.unlink(missing_ok=True)
