"""Times the operators of a step on a GPU: the durations of their kernels, by torch's profiler.

A call only enqueues kernels, so the host's clock says nothing about them. Each operator runs in a
named range; the profiler (Kineto, CUPTI) records every kernel with the range that launched it, and
the durations are summed by the innermost range. Steps run without CUDA graphs meanwhile, because a
replayed graph has no ranges; the kernels are the same.

The time of a step is that of its kernels: gaps between them are what CUDA graphs shorten, and show
in the difference to the passes without timing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ridgeline.engine.execution.greedy_fast_path import NoGreedyPath
from ridgeline.engine.execution.layers.fused import FusedForward, FusedLayer
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.scheduler.plan import Run
from ridgeline.errors import CannotRun
from ridgeline.records import OperatorTime

PREFIX = "ridgeline::"


class KernelTimes:
    """Sums up the durations of kernels by the innermost named range that launched them."""

    def __init__(self) -> None:
        self._profiler = self._start()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Run `call` in a range `name`."""

        def wrapped(*args: Any, **named: Any) -> Any:
            with record_function(PREFIX + name):
                return call(*args, **named)

        return wrapped

    def read(self) -> dict[str, OperatorTime]:
        """The times since the last call."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.__exit__(None, None, None)
        times = sum_by_range(self._profiler.events() or [])
        self._profiler = self._start()
        return times

    def close(self) -> None:
        """Stop recording."""
        self._profiler.__exit__(None, None, None)

    def _start(self) -> profile:
        device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        profiler = profile(activities=[ProfilerActivity.CPU, *device])
        profiler.__enter__()
        return profiler


def sum_by_range(events: Sequence[Any]) -> dict[str, OperatorTime]:
    """Calls and kernel seconds of each named range; kernels outside of ranges are `other`.

    `events` are the profiler's; `kernels` of a CPU event are those that it launched itself.
    """
    calls: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for event in events:
        if event.name.startswith(PREFIX) and event.device_type.name == "CPU":
            name = event.name.removeprefix(PREFIX)
            calls[name] = calls.get(name, 0) + 1
        kernel_us = sum(kernel.duration for kernel in event.kernels)
        if kernel_us:
            name = _range_of(event)
            seconds[name] = seconds.get(name, 0.0) + kernel_us / 1e6
    return {name: OperatorTime(calls.get(name, 1), spent) for name, spent in seconds.items()}


def _range_of(event: Any) -> str:
    while event is not None:
        if event.name.startswith(PREFIX):
            return str(event.name.removeprefix(PREFIX))
        event = event.cpu_parent
    return "sampling"  # what the runner enqueues around the layers: the choice of tokens


@contextmanager
def device_operators_timed(runner: TorchRunner) -> Iterator[Callable[[], dict[str, OperatorTime]]]:
    """Time the runner's operators within the context; call the yielded function after each step.

    Raises CannotRun for layers other than `FusedForward`.
    """
    forward = runner.decoder.forward
    if not isinstance(forward, FusedForward):
        raise CannotRun(
            "the operators of these layers cannot be timed on a GPU",
            value=type(forward).__name__,
            fix="use --layer-backend triton or compiled",
        )
    times = KernelTimes()
    with ExitStack() as stack:
        stack.callback(times.close)
        _swap(stack, runner, "graphs", None)
        _swap(stack, runner, "ahead", None)
        _swap(stack, runner, "greedy", NoGreedyPath())
        _swap(stack, runner, "attention", _RangedAttention(times, runner.attention))
        decoder = runner.decoder
        _swap(stack, decoder, "lm_head", times.timed("lm_head", decoder.lm_head))
        _swap(stack, decoder, "forward", times.timed("embed", _timed_forward(times, forward)))
        yield times.read


def _swap(stack: ExitStack, owner: object, name: str, value: object) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _timed_forward(times: KernelTimes, forward: FusedForward) -> FusedForward:
    """A copy of the layers that share their weights, with every operator in a range."""
    timed: Any = copy(forward)
    timed.layers = tuple(_timed_layer(times, layer) for layer in forward.layers)
    timed.next_norms = (
        *((layer.qkv, layer.attention_gain_C) for layer in timed.layers[1:]),
        forward.next_norms[-1],
    )
    timed.ops = _timed_methods(
        times,
        forward.ops,
        {"first_norm": "norm", "add_norm": "residual+norm", "gate": "activation"},
    )
    timed._attention = times.timed("rope+kv_write", timed._attention)
    own: FusedForward = timed
    return own


def _timed_layer(times: KernelTimes, layer: FusedLayer) -> FusedLayer:
    linears = {
        name: _timed_methods(
            times, getattr(layer, name), {"__call__": name, "multiply_rounded": name}
        )
        for name in ("qkv", "o", "gate_up", "down")
    }
    return dataclasses.replace(layer, **linears)


class _RangedAttention:
    def __init__(self, times: KernelTimes, attention: Any) -> None:
        self._times, self._attention = times, attention

    def prepare(self, runs: Sequence[Run]) -> Any:
        step = self._attention.prepare(runs)
        return _timed_methods(
            self._times, step, {"attend_stored": "attention", "__call__": "attention+kv_write"}
        )


def _timed_methods(times: KernelTimes, owner: Any, names: dict[str, str]) -> Any:
    """A copy of `owner` whose methods run in ranges; it stays an instance of its class."""
    kind = type(owner)
    methods = {
        method: times.timed(name, getattr(kind, method))
        for method, name in names.items()
        if hasattr(kind, method)
    }
    timed = copy(owner)
    object.__setattr__(
        timed, "__class__", type(kind.__name__, (kind,), {"__slots__": (), **methods})
    )
    return timed
