"""Streams, events and graphs of `torch.cuda` on the CPU, for the code that only a GPU would run.

Graphs record operators (`recorded_graphs.py`). What CUDA refuses fails as it does there: a capture
on the default stream, two at once, waiting within one. An error within a capture makes it invalid,
so that ending it fails too; until it is ended no other may begin.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.execution.recorded_graphs import Forbidden, Recorder


class CudaError(RuntimeError):
    """What CUDA answers."""


class Stream:
    """Work in order; on the CPU all of it is done at once."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def wait_stream(self, other: Stream) -> None:
        self._card.log.append("wait_stream")

    def synchronize(self) -> None:
        self._card.wait("stream")


class Event:
    """Marks a place in a stream."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def record(self) -> None:
        self._card.log.append("record")

    def synchronize(self) -> None:
        self._card.wait("event")


class Graph:
    """The protocol of `torch.cuda.CUDAGraph`."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._recorder: Recorder | None = None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        card = self._card
        if card.capture is not None:
            raise CudaError("a capture is under way")
        if card.streams[-1] is card.default:
            raise CudaError("the default stream cannot be captured")
        self._recorder = CheckedRecorder(card)
        card.capture, card.is_valid = self._recorder, True
        self._recorder.__enter__()

    def capture_end(self) -> None:
        card, recorder = self._card, self._recorder
        if recorder is None or card.capture is not recorder:
            raise CudaError("no capture of this graph is under way")
        recorder.__exit__(None, None, None)
        card.capture = None
        if not card.is_valid:
            raise CudaError("the capture was invalidated by an earlier error")
        recorder.poison()
        card.log.append("capture")

    def replay(self) -> None:
        assert self._recorder is not None, "not captured"
        self._card.log.append("replay")
        self._recorder.replay()


class CheckedRecorder(Recorder):
    """Makes the capture invalid when it meets what a capture forbids."""

    def __init__(self, card: Card) -> None:
        super().__init__(card.own)
        self._card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except Forbidden:
            self._card.is_valid = False
            raise


class Card:
    """The one card of this process; `log` holds what was asked of it, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.own: dict[int, torch.Tensor] = {}
        self.capture: Recorder | None = None
        self.is_valid = True
        self.default = Stream(self)
        self.streams = [self.default]

    def wait(self, what: str) -> None:
        """The host waits for the card, which a capture does not allow."""
        if self.capture is not None:
            self.is_valid = False
            raise CudaError(f"waited for the {what} within a capture")
        self.log.append(f"wait for the {what}")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of `torch.cuda`."""
        cuda = torch.cuda
        for name, value in (
            ("graph_pool_handle", lambda: (0, 1)),
            ("synchronize", lambda *_: self.wait("card")),
            ("current_stream", lambda *_: self.streams[-1]),
            ("Stream", lambda *_: Stream(self)),
            ("Event", lambda **_: Event(self)),
            ("CUDAGraph", lambda: Graph(self)),
            ("stream", lambda stream: StreamContext(self, stream)),
            ("graph", lambda graph, **options: GraphContext(self, graph, options)),
        ):
            monkeypatch.setattr(cuda, name, value)


class StreamContext:
    """The protocol of `torch.cuda.stream`."""

    def __init__(self, card: Card, stream: Stream) -> None:
        self._card, self._stream = card, stream

    def __enter__(self) -> None:
        self._before = self._card.streams[-1]
        self._card.streams.append(self._stream)

    def __exit__(self, *error: object) -> None:
        self._card.streams.append(self._before)


class GraphContext:
    """The protocol of `torch.cuda.graph`, which leaves its stream only if the capture ends well."""

    def __init__(self, card: Card, graph: Graph, options: dict[str, Any]) -> None:
        self._graph, self._options = graph, options
        self._stream = StreamContext(card, Stream(card))

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        self._stream.__enter__()
        self._graph.capture_begin(**self._options)

    def __exit__(self, *error: object) -> None:
        self._graph.capture_end()
        self._stream.__exit__(*error)
