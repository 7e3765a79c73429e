"""How models write what is more than text: reasoning, and calls of tools. Text in, parts out.

The registry names the formats of tool calls; none is imported until a server is told to use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ridgeline.serve.output_parsers.base import CallFormat

CALL_FORMATS = {
    "hermes": "ridgeline.serve.output_parsers.hermes:Hermes",
    "llama3_json": "ridgeline.serve.output_parsers.llama:LlamaJson",
    "qwen3_xml": "ridgeline.serve.output_parsers.qwen:QwenXml",
}


def call_format(name: str) -> CallFormat:
    """The format of that name."""
    module, _, attribute = CALL_FORMATS[name].partition(":")
    return cast("CallFormat", getattr(import_module(module), attribute)())
