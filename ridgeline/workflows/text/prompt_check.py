"""A prompt behind a model that may be left out must not be the model."""

from __future__ import annotations

import shlex
from pathlib import Path

from ridgeline.errors import BadInput
from ridgeline.modelspec.checkpoints.locate import is_dummy, is_short_name
from ridgeline.records.progress import Message, Observer


def check_is_no_model(prompt: str) -> None:
    """BadInput for a prompt that names a model: the prompt was left out, and another model would
    answer its name."""
    is_line = "\n" not in prompt and len(prompt) < 1000
    if is_short_name(prompt) or (is_line and _is_model_file(Path(prompt))):
        raise BadInput(
            "generate needs a prompt after the model",
            value=prompt,
            fix=f'ridgeline generate {shlex.quote(prompt)} "def fib(n):"; to send this text, name'
            " a model before it",
        )


def _is_model_file(path: Path) -> bool:
    try:
        return (path.suffix == ".gguf" and path.is_file()) or (path / "config.json").is_file()
    except (OSError, ValueError):  # no name that a file can have
        return False


def text_or_bytes(model: str, text: str, observer: Observer) -> str | list[int]:
    """The text; its bytes as token ids for a `dummy:SHAPE`, which has no tokenizer, and says so."""
    if not is_dummy(model):
        return text
    observer(
        Message(
            text=f"{model} has no tokenizer: the bytes of the prompt are its token ids, and the "
            "answer has no text"
        )
    )
    return list(text.encode())
