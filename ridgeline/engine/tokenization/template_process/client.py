"""The side of this process: sends conversations, and kills the renderer that takes too long."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import IO, Any

from ridgeline.engine.tokenization.chat import Chat
from ridgeline.engine.tokenization.template_process.messages import pack, unpack_length
from ridgeline.errors import BadInput, BadModel

_MODULE = "ridgeline.engine.tokenization.template_process.renderer"
_START_TIMEOUT_S = 60.0
_ERRORS = {"BadInput": BadInput, "BadModel": BadModel}


@dataclasses.dataclass(frozen=True, slots=True)
class RenderLimits:
    """`timeout_s` for one conversation; memory of the process; characters of the text."""

    timeout_s: float = 5.0
    max_memory_bytes: int = 1 << 30
    max_output_chars: int = 16 << 20


class ProcessTemplate:
    """Renders the templates `sources` in a process that is started by the first conversation.

    The arguments and errors are those of `JinjaTemplate`.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        names: Mapping[str, str],
        limits: RenderLimits | None = None,
    ) -> None:
        self.uses_tools = any("tools" in source for source in sources.values())
        self.uses_calls = any("tool_calls" in source for source in sources.values())
        self.uses_documents = any("documents" in source for source in sources.values())
        self._limits = limits or RenderLimits()
        self._setup = pack(
            {
                "sources": dict(sources),
                "names": dict(names),
                "max_memory_bytes": self._limits.max_memory_bytes,
                "max_output_chars": self._limits.max_output_chars,
            }
        )
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, chat: Chat) -> str:
        """The conversation as prompt text.

        Raises BadInput if the template rejects it or exceeds a limit, BadModel if it is not valid.
        """
        try:
            fields = dataclasses.fields(chat)  # unlike `asdict`, without a copy of the conversation
            request = pack({field.name: getattr(chat, field.name) for field in fields})
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput("the conversation is not JSON", value=str(error)) from None
        with self._lock:
            reply = self._exchange(request)
        if "text" in reply:
            return str(reply["text"])
        raise _ERRORS[reply["error"]](reply["what"], limit=reply["limit"], fix=reply["fix"])

    def _exchange(self, request: bytes) -> dict[str, Any]:
        if self._process is not None and self._process.poll() is not None:
            self._kill()  # it ended since the last conversation, which is no fault of this one
        try:
            process = self._process or self._start()
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.flush()
            return _read(process, self._limits.timeout_s)
        except TimeoutError:
            self._kill()
            raise BadInput(
                "the model's chat template takes too long for this conversation",
                limit=f"{self._limits.timeout_s:g} s",
                fix="send a shorter conversation, or replace the template",
            ) from None
        except (OSError, EOFError):
            self._kill()
            raise BadInput(
                "the model's chat template ended the process that renders it",
                limit=f"{self._limits.max_memory_bytes} bytes of memory",
                fix="send a shorter conversation, or replace the template",
            ) from None

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],  # -P: no module of the working directory
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # the terminal's Ctrl+C is not meant for it
        )
        weakref.finalize(self, _stop, self._process)
        assert self._process.stdin is not None
        self._process.stdin.write(self._setup)
        self._process.stdin.flush()
        _read(self._process, _START_TIMEOUT_S)
        return self._process

    def _kill(self) -> None:
        if self._process is not None:
            _stop(self._process)
            self._process = None


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # unsent data of a pipe that is broken
                pipe.close()


def _read(process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
    """The next message. Raises TimeoutError or EOFError."""
    assert process.stdout is not None
    deadline_s = time.monotonic() + timeout_s
    length = unpack_length(_read_exactly(process.stdout, 4, deadline_s))
    reply: dict[str, Any] = json.loads(_read_exactly(process.stdout, length, deadline_s))
    return reply


def _read_exactly(pipe: IO[bytes], num_bytes: int, deadline_s: float) -> bytes:
    data = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while len(data) < num_bytes:
            if not selector.select(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError
            piece = os.read(pipe.fileno(), num_bytes - len(data))
            if not piece:
                raise EOFError
            data += piece
    return bytes(data)
