"""Parsers of model output: reasoning and tool calls, in the format that the model writes them.

Text in, parts out. The registry names the formats of tool calls; a format is imported when a server
is configured to use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ridgeline.serve.output_parsers.base import ToolCallFormat

TOOL_CALL_FORMATS = {
    "hermes": "ridgeline.serve.output_parsers.hermes:HermesFormat",
    "llama3_json": "ridgeline.serve.output_parsers.llama:LlamaJsonFormat",
    "openai": "ridgeline.serve.output_parsers.harmony:HarmonyFormat",
    "qwen3_xml": "ridgeline.serve.output_parsers.qwen:QwenXmlFormat",
}


def tool_call_format(name: str) -> ToolCallFormat:
    """The tool call format registered under `name`."""
    module, _, attribute = TOOL_CALL_FORMATS[name].partition(":")
    return cast("ToolCallFormat", getattr(import_module(module), attribute)())
