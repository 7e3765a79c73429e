"""The chat templates of a model directory, from each place where transformers looks for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.engine.tokenization.chat import ChatTemplate, JinjaTemplate, NoChatTemplate
from ridgeline.engine.tokenization.template_process import ProcessTemplate
from ridgeline.errors import DECODE_ERRORS, BadModel
from ridgeline.modelspec.checkpoints.json_files import read_json
from ridgeline.modelspec.checkpoints.special_tokens import special_token_names, tokenizer_config

_OWN_MODELS = Path(__file__).parents[2]  # the package, which holds the demo model
_MAX_TEMPLATE_BYTES = 1_000_000
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
PROCESSOR_FILE = "chat_template.json"
"""Where processors of image models keep the template, as a JSON object."""


def load_chat_template(path: Path) -> ChatTemplate:
    """Load the templates of a directory. Raises BadModel where one is malformed.

    `chat_template.jinja` and `additional_chat_templates/NAME.jinja` replace those named in
    tokenizer_config.json.
    """
    config = tokenizer_config(path)
    sources = _files(path) or _configured(path, config) or _of_processor(path)
    if not sources:
        return NoChatTemplate()
    if path.is_relative_to(_OWN_MODELS):  # trusted: it needs no process of its own
        return JinjaTemplate(sources, special_token_names(config))
    return ProcessTemplate(sources, special_token_names(config))


def _files(path: Path) -> dict[str, str]:
    files = {file.stem: file for file in sorted((path / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (path / TEMPLATE_FILE).is_file():
        files["default"] = path / TEMPLATE_FILE
    return {name: _read(file) for name, file in files.items()}


def _read(file: Path) -> str:
    if file.stat().st_size > _MAX_TEMPLATE_BYTES:
        raise BadModel(
            "the chat template is too large", value=str(file), limit=f"{_MAX_TEMPLATE_BYTES} bytes"
        )
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadModel("the chat template is not valid UTF-8", value=str(error)) from None


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _Templates(msgspec.Struct):
    """The templates in tokenizer_config.json: one, or several with names."""

    chat_template: str | list[_NamedTemplate] | None = None


def _configured(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    try:
        found = msgspec.convert(config, _Templates).chat_template
    except DECODE_ERRORS as error:
        raise BadModel(f"tokenizer_config.json of {path}: {error}") from None
    if isinstance(found, list):
        return {entry.name: entry.template for entry in found}
    return {} if found is None else {"default": found}


def _of_processor(path: Path) -> dict[str, str]:
    file = path / PROCESSOR_FILE
    found = read_json(file).get("chat_template") if file.is_file() else None
    return {"default": found} if isinstance(found, str) else {}
