"""Reads the JSON files of a model directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ridgeline.errors import DECODE_ERRORS, BadModel

MAX_JSON_BYTES = 50_000_000


@contextmanager
def file_errors() -> Iterator[None]:
    """Raise BadModel, with the file and the system's reason, for every OSError of the block."""
    try:
        yield
    except OSError as error:
        raise BadModel(
            "a file of the model cannot be read",
            value=None if error.filename is None else str(error.filename),
            fix=error.strerror or str(error),
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; BadModel where it is missing, too large, or not one."""
    document = _load(path)
    if not isinstance(document, dict):
        raise BadModel("the file is not a JSON object", value=str(path))
    return document


def read_json_objects(path: Path) -> list[dict[str, Any]]:
    """A list of JSON objects from a file; BadModel where it is missing, too large, or not one."""
    document = _load(path)
    if not isinstance(document, list) or not all(isinstance(entry, dict) for entry in document):
        raise BadModel("the file is not a list of JSON objects", value=str(path))
    return document


def _load(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise BadModel(
                "the file is too large", value=str(path), limit=f"{MAX_JSON_BYTES} bytes"
            )
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadModel("cannot read the file", value=str(path), fix=str(error)) from None
    except DECODE_ERRORS as error:
        raise BadModel("the file is not valid JSON", value=str(path), fix=str(error)) from None
