"""The special tokens that a model directory declares, with the precedence transformers uses.

`tokenizer_config.json` names them (`bos_token`, `eos_token`, `image_token`, …). Where it has no
`added_tokens_decoder`, as in directories written before transformers 4.34, the entries of
`special_tokens_map.json` replace them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.json_files import MAX_JSON_BYTES, read_json
from ridgeline.modelspec.checkpoints.sentencepiece_model import FILE, read_sentencepiece

_LISTS = ("extra_special_tokens", "additional_special_tokens")


def tokenizer_config(path: Path) -> dict[str, Any]:
    """`tokenizer_config.json` with the entries of `special_tokens_map.json` where they apply."""
    file, legacy = path / "tokenizer_config.json", path / "special_tokens_map.json"
    config = read_json(file) if file.is_file() else {}
    if "added_tokens_decoder" not in config and legacy.is_file():
        config |= read_json(legacy)
    return config


def special_token_names(config: Mapping[str, Any]) -> dict[str, str]:
    """The text of each named special token (`bos_token`, `sep_token`, …), for chat templates."""
    tables = [config, *(t for name in _LISTS if isinstance(t := config.get(name), Mapping))]
    return {
        name: text
        for table in tables
        for name, token in table.items()
        if name.endswith("_token") and (text := token_text(token)) is not None
    }


def token_text(token: object) -> str | None:
    """The text of a special token, which is a string or an object with a `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def declared_tokens(path: Path) -> dict[int, str]:
    """The added tokens that a directory declares in addition to its vocabulary, by id.

    They lie in tokenizer_config.json (`added_tokens_decoder`), in older directories in
    added_tokens.json.
    """
    added = tokenizer_config(path).get("added_tokens_decoder")
    if isinstance(added, Mapping) and added:
        texts = {int(i): token_text(t) for i, t in added.items() if str(i).isdigit()}
        return {i: text for i, text in texts.items() if text is not None}
    file = path / "added_tokens.json"
    table = read_json(file) if file.is_file() else {}
    return {i: text for text, i in table.items() if isinstance(i, int) and i >= 0}


def tokenizer_eos_ids(path: Path) -> tuple[int, ...]:
    """The id of the tokenizer's own `eos_token`: () if it has none, or no id is known for it.

    Fine-tunes on a chat format often change only the tokenizer's `eos_token`, and leave the base
    model's in config.json. Raises BadModel for files that are not JSON objects.
    """
    text = token_text(tokenizer_config(path).get("eos_token"))
    if text is None:
        return ()
    declared = next((i for i, token in declared_tokens(path).items() if token == text), None)
    return _ids_in_tokenizer(path, text) if declared is None else (declared,)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _ids_in_tokenizer(path: Path, text: str) -> tuple[int, ...]:
    file = path / "tokenizer.json"
    if not file.is_file() and (path / FILE).is_file():
        return _ids_of_piece(path / FILE, text)
    if not file.is_file():
        return _ids_in_table(path / "vocab.json", text)
    if file.stat().st_size > MAX_JSON_BYTES:
        raise BadModel("the file is too large", value=str(file), limit=f"{MAX_JSON_BYTES} bytes")
    try:
        tokenizer = msgspec.json.decode(file.read_bytes(), type=_Tokenizer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()  # the tokenizer's own reader reports what is wrong with the file
    return next(
        (
            (added_token.id,)
            for added_token in tokenizer.added_tokens
            if added_token.content == text
        ),
        (),
    )


def _ids_in_table(file: Path, text: str) -> tuple[int, ...]:
    index = read_json(file).get(text) if file.is_file() else None
    return (index,) if isinstance(index, int) else ()


def _ids_of_piece(file: Path, text: str) -> tuple[int, ...]:
    try:
        pieces = read_sentencepiece(file).pieces
    except BadModel:
        return ()  # the tokenizer's own reader reports what is wrong with the file
    return next(((i,) for i, piece in enumerate(pieces) if piece.text == text), ())
