"""Workloads by name; `parse_workload` reads the value of --workload."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import cast

from ridgeline.errors import BadInput
from ridgeline.measure.workload.base import (
    ChatPrompt,
    LoadRequest,
    Prompt,
    PromptMessage,
    UserTurn,
    Workload,
    plain_chat,
)

__all__ = [
    "REGISTRY",
    "ChatPrompt",
    "LoadRequest",
    "Prompt",
    "PromptMessage",
    "UserTurn",
    "Workload",
    "parse_workload",
    "plain_chat",
]

# name → "module:function"; the function takes the text after the name's colon ("" if there is none)
REGISTRY: Mapping[str, str] = MappingProxyType(
    {
        "chat-and-code": "ridgeline.measure.workload.embedded:chat_and_code",
        "chat": "ridgeline.measure.workload.embedded:chat",
        "code": "ridgeline.measure.workload.embedded:code",
        "synthetic": "ridgeline.measure.workload.synthetic:parse",
        "synthetic-chat": "ridgeline.measure.workload.presets:synthetic_chat",
        "rag": "ridgeline.measure.workload.presets:rag",
        "code-edit": "ridgeline.measure.workload.presets:code_edit",
        "long-document": "ridgeline.measure.workload.presets:long_document",
        "batch": "ridgeline.measure.workload.presets:batch",
        "sharegpt": "ridgeline.measure.workload.sharegpt:sharegpt",
        "conversations": "ridgeline.measure.workload.sharegpt:conversations",
        "azure": "ridgeline.measure.workload.traces:azure",
        "burstgpt": "ridgeline.measure.workload.traces:burstgpt",
        "mooncake": "ridgeline.measure.workload.traces:mooncake",
    }
)

_FORMS = (
    "chat-and-code, chat, code, synthetic:input=256,output=128[,cv=0.5][,prefix=64][,groups=4], "
    "synthetic-chat, rag, code-edit, long-document, batch, sharegpt:FILE, conversations:FILE, "
    "azure:FILE, burstgpt:FILE, mooncake:FILE, FILE.jsonl"
)


def parse_workload(text: str) -> Workload:
    """A workload from its name, its `name:options`, or the path of a JSONL file."""
    name, _, options = text.partition(":")
    if name in REGISTRY:
        module, _, function = REGISTRY[name].partition(":")
        return cast(Workload, getattr(import_module(module), function)(options))
    if text.endswith(".jsonl") or Path(text).is_file():
        from ridgeline.measure.workload.jsonl import read_workload

        return read_workload(Path(text))
    raise BadInput("unknown workload", value=text, limit=_FORMS, fix=_closest(name))


def _closest(name: str) -> str:
    near = difflib.get_close_matches(name, list(REGISTRY), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else "name an embedded workload or an existing file"
