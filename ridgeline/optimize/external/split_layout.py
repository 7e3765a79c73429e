"""What a candidate command says about a layout with prefill and decode apart.

A flag gives each server its part: vLLM by the `kv_role` in `--kv-transfer-config`, SGLang and
Ridgeline by `--disaggregation-mode`. The command, or the script that it runs, is read for them; a
role that stands for both (vLLM's `kv_both`) tells nothing.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import msgspec

MAX_SCRIPT_BYTES = 1 << 16
_PREFILL = r"kv_role\W{1,9}kv_producer|--disaggregation-mode[ =]+prefill"
_DECODE = r"kv_role\W{1,9}kv_consumer|--disaggregation-mode[ =]+decode"


class SplitLayout(msgspec.Struct, frozen=True):
    """How many servers compute prompts, and how many generate answers."""

    num_prefill: int
    num_decode: int


def read_split(command: str) -> SplitLayout | None:
    """The layout that a command starts; None if it does not name servers of both kinds."""
    texts = [command, *(_script(word) for word in shlex.split(command))]
    lines = [line for text in texts for line in text.splitlines() if not re.match(r"\s*#", line)]
    text = "\n".join(lines)
    layout = SplitLayout(len(re.findall(_PREFILL, text)), len(re.findall(_DECODE, text)))
    return layout if layout.num_prefill and layout.num_decode else None


def _script(word: str) -> str:
    """The text of a script that the word names; "" for any other word."""
    path = Path(word)
    try:
        if not path.is_file() or path.stat().st_size > MAX_SCRIPT_BYTES:
            return ""
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
