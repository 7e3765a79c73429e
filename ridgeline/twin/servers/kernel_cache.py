"""The compiled kernels that a twin finds again, as its server would: a file for each program.

A server compiles a program for its model, layout, formats and token budget, and keeps it in the
folder of an environment variable. The twin keeps an empty file there, only if the variable is set:
other twins on this machine are other machines.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from ridgeline.twin.servers.command_line import ServerLine

VARIABLES = {"vllm": "VLLM_CACHE_ROOT"}
"""Server → where it keeps what it compiles."""

_PROGRAM = ("model", "tp", "quantization", "kv_cache_dtype", "max_num_batched_tokens")
_FOLDER = "twin_compile_cache"


def kernel_file(line: ServerLine) -> Path | None:
    """The file that stands for the program of a command line; None without a place for it."""
    root = os.environ.get(VARIABLES.get(line.server, ""))
    if not root:
        return None
    fields = [getattr(line, name) for name in (*_PROGRAM, "expert_parallel")]
    digest = hashlib.sha256(msgspec.json.encode(fields)).hexdigest()[:16]
    return Path(root) / _FOLDER / digest


def note_compiled(file: Path | None) -> None:
    """Later starts find the program."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
