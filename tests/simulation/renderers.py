"""The processes that render chat templates, on virtual time: they die, hang, and die unused.

`ProcessTemplate` is the real one; only its processes and the reading from their pipes are not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ridgeline.engine.tokenization.chat import Chat, JinjaTemplate
from ridgeline.engine.tokenization.template_process import client
from ridgeline.engine.tokenization.template_process.messages import unpack_length
from tests.simulation.virtual_time import VirtualLoop


class Renderers:
    """Every process of one server, at most one per model. `fault`: the probability of each fault
    per conversation."""

    def __init__(
        self, loop: VirtualLoop, rng: random.Random, fault: float, num_models: int = 1
    ) -> None:
        self.loop, self.rng, self.fault, self.num_models = loop, rng, fault, num_models
        self.started: list[VirtualProcess] = []
        self.num_refused = 0  # conversations that a client was refused because of a process
        self.note: Callable[[str], None] = lambda text: None
        self.num_failed = 0  # conversations whose process died or hung

    @property
    def num_alive(self) -> int:
        return sum(process.is_alive for process in self.started)

    def check(self) -> None:
        """Raise AssertionError for a process left behind, or a refusal without a fault."""
        assert self.num_alive <= self.num_models, f"{self.num_alive} renderers are alive"
        assert self.num_refused <= self.num_failed, (
            f"{self.num_refused} conversations were refused, but {self.num_failed} renderers failed"
        )

    @contextmanager
    def patched(self) -> Iterator[None]:
        """`ProcessTemplate` starts these processes instead of real ones."""
        with (
            mock.patch.object(client.subprocess, "Popen", self._open),
            mock.patch.object(client, "_read", self._read),
        ):
            yield

    def _open(self, *_: Any, **__: Any) -> VirtualProcess:
        process = VirtualProcess()
        self.started.append(process)
        return process

    def _read(self, process: VirtualProcess, timeout_s: float) -> dict[str, Any]:
        """The reply to the last message, or what a fault makes of it."""
        draw = self.rng.random()
        if draw < self.fault:
            self.note("a renderer dies")
            self.num_failed += 1
            process.kill()
            raise EOFError
        if draw < 2 * self.fault:
            self.note("a renderer hangs")
            self.num_failed += 1
            self.loop.spent_s += timeout_s
            raise TimeoutError
        if draw < 4 * self.fault:
            self.loop.call_later(self.rng.uniform(0, 1), self._die_unused, process)
        return process.reply()

    def _die_unused(self, process: VirtualProcess) -> None:
        self.note("a renderer dies between conversations")
        process.kill()


class VirtualProcess:
    """A renderer, and its two pipes."""

    def __init__(self) -> None:
        self.stdin = self.stdout = self
        self._sent = b""
        self._template: JinjaTemplate | None = None
        self.is_alive = True

    def write(self, data: bytes) -> None:
        if not self.is_alive:
            raise BrokenPipeError
        self._sent += data

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def kill(self) -> None:
        self.is_alive = False

    def wait(self) -> int:
        return -9

    def poll(self) -> int | None:
        return None if self.is_alive else -9

    def reply(self) -> dict[str, Any]:
        """What the process answers to the message that it was sent."""
        data, self._sent = self._sent, b""
        message = json.loads(data[4:])
        assert len(data) == 4 + unpack_length(data[:4]), "more than one message was sent"
        if self._template is None:
            self._template = JinjaTemplate(message["sources"], message["names"])
            return {"text": ""}
        return {"text": self._template.render(Chat(**message))}
