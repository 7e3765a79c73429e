"""The process that renders: `python -m` this module. Ends when its input does."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from ridgeline.engine.tokenization.chat import Chat, JinjaTemplate
from ridgeline.engine.tokenization.template_process.messages import pack, unpack_length
from ridgeline.errors import BadInput, UserError


def main() -> None:
    """Answer every conversation on standard input until it is closed."""
    setup = _receive()
    if setup is None:
        return
    limit = setup["max_memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template = JinjaTemplate(setup["sources"], setup["names"])
    _send({"text": ""})
    while (request := _receive()) is not None:
        try:
            text = template.render(Chat(**request))
            if len(text) > setup["max_output_chars"]:
                raise BadInput(
                    "the model's chat template renders too long a text",
                    limit=f"{setup['max_output_chars']} characters",
                    fix="send a shorter conversation, or replace the template",
                )
            _send({"text": text})
        except UserError as error:
            limit_text = None if error.limit is None else str(error.limit)
            kind = type(error).__name__
            _send({"error": kind, "what": error.what, "limit": limit_text, "fix": error.fix})


def _receive() -> dict[str, Any] | None:
    head = sys.stdin.buffer.read(4)
    if len(head) < 4:
        return None
    message: dict[str, Any] = json.loads(sys.stdin.buffer.read(unpack_length(head)))
    return message


def _send(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(pack(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
