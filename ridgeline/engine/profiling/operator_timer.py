"""Times the operators of a step while the engine runs as usual.

Native layers time their own operators (`FusedFrame.profile`: from the end of the previous operator
to the end of this one, on the thread that finishes it). Everything else is wrapped: torch layers,
attention outside of a native segment, the LM head, sampling. The time of a nested timed call is
subtracted from the outer one, so no time is counted twice.

Operators are named for their work (`ridgeline.modelspec.cost.operators`).
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from typing import Any, cast

import torch

from ridgeline.engine.attention.native import NativeAttention
from ridgeline.engine.execution.greedy_fast_path import NativeGreedyPath
from ridgeline.engine.execution.layers.fused import FusedForward
from ridgeline.engine.execution.layers.native import NativeForward
from ridgeline.engine.execution.layers.torch_ops import TorchForward
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.model.layers import Block, GatedMlp, LatentAttention, UngatedMlp, no_norm
from ridgeline.engine.profiling.device_timer import device_operators_timed
from ridgeline.engine.sampling.argmax_head import NativeArgmax
from ridgeline.engine.scheduler.plan import Run
from ridgeline.errors import CannotRun
from ridgeline.modelspec.cost import has_states
from ridgeline.modelspec.layer_inputs import refuse_special_layers
from ridgeline.records import OperatorTime

Clock = Callable[[], float]
Operators = dict[str, OperatorTime]


class Stopwatch:
    """Sums up seconds by name, excluding the time of nested timed calls."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._nested_s: list[float] = []  # of each open call: seconds of timed calls within it
        self._times: Operators = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `call` so that its runs are counted under `name`."""

        def wrapped(*args: Any, **named: Any) -> Any:
            self._nested_s.append(0.0)
            begun = self.clock()
            try:
                return call(*args, **named)
            finally:
                took = self.clock() - begun
                self.add(name, 1, took - self._nested_s.pop())
                if self._nested_s:
                    self._nested_s[-1] += took

        return wrapped

    def add(self, name: str, calls: int, time_s: float) -> None:
        """Add the time of `calls` calls."""
        before = self._times.get(name, OperatorTime(0, 0.0))
        self._times[name] = OperatorTime(before.calls + calls, before.time_s + time_s)

    def read(self) -> Operators:
        """Return the times since the last call and reset them."""
        times, self._times = self._times, {}
        return times


@contextmanager
def operators_timed(runner: TorchRunner, watch: Stopwatch) -> Iterator[Callable[[], Operators]]:
    """Time the runner's operators within the context; call the yielded function after each step.

    On a GPU the profiler's times of kernels take the place of `watch`, and steps run without CUDA
    graphs. Raises CannotRun for layers that cannot be timed.
    """
    _check_can_time(runner)
    if runner.decoder.device.type == "cuda":
        with device_operators_timed(runner) as read:
            yield read
        return
    with ExitStack() as stack:
        put = partial(_put, stack)
        _time_choice(runner, watch, put)
        forward = runner.decoder.forward
        if isinstance(forward, NativeForward):
            yield _time_segments(forward, runner, watch, stack)
        else:
            _time_layers(runner, watch, put)
            yield watch.read


def _check_can_time(runner: TorchRunner) -> None:
    decoder = runner.decoder
    refuse_special_layers(decoder.spec, "the timer of operators")
    if has_states(decoder.spec):
        raise CannotRun(
            "the operators of gated delta nets cannot be timed", value=decoder.spec.family
        )
    if not isinstance(decoder.forward, NativeForward | TorchForward | FusedForward):
        raise CannotRun(
            "the operators of this layer backend cannot be timed",
            value=type(decoder.forward).__name__,
        )


Put = Callable[[object, str, object], None]


def _put(stack: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute until the stack exits. A method is shadowed by an instance attribute."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, getattr(owner, name))
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _time_choice(runner: TorchRunner, watch: Stopwatch, put: Put) -> None:
    """Time the LM head and token selection, on every path a step can take."""
    decoder, argmax_head, greedy = runner.decoder, runner.argmax_head, runner.greedy
    put(decoder, "lm_head", watch.timed("lm_head", decoder.lm_head))
    put(runner, "_sample", watch.timed("sampling", runner._sample))
    if isinstance(argmax_head, NativeArgmax):
        put(argmax_head, "head", _TimedHead(watch, argmax_head.head))
    choice = _TimedChoice(watch, argmax_head)
    put(runner, "argmax_head", choice)
    if isinstance(greedy, NativeGreedyPath):
        put(greedy, "argmax_head", choice)


class _TimedHead:
    def __init__(self, watch: Stopwatch, head: Any) -> None:
        self.multiply_rows = watch.timed("lm_head", head.multiply_rows)


class _TimedChoice:
    def __init__(self, watch: Stopwatch, argmax_head: Any) -> None:
        self._call = watch.timed("sampling", argmax_head)
        if isinstance(argmax_head, NativeArgmax):
            self.from_memory = watch.timed("sampling", argmax_head.from_memory)

    def __call__(self, x_SC: torch.Tensor) -> list[int]:
        tokens: list[int] = self._call(x_SC)
        return tokens


class _TimedAttention:
    """Attention outside of the native segments; it also writes keys and values."""

    def __init__(self, watch: Stopwatch, attention: Any) -> None:
        self._watch, self._attention = watch, attention

    def prepare(self, runs: Sequence[Run]) -> Callable[..., Any]:
        step: Any = self._attention.prepare(runs)
        timed: Any = self._watch.timed("attention+kv_write", step)
        if hasattr(step, "attend_latent"):
            timed.attend_latent = self._watch.timed("attention+kv_write", step.attend_latent)
        return cast(Callable[..., Any], timed)


def _time_segments(
    forward: NativeForward, runner: TorchRunner, watch: Stopwatch, stack: ExitStack
) -> Callable[[], Operators]:
    """Native layers time their own operators; attention outside of them is wrapped."""
    if not isinstance(runner.attention, NativeAttention):
        _put(stack, runner, "attention", _TimedAttention(watch, runner.attention))
    forward.frame.profile(True)
    stack.callback(forward.frame.profile, False)

    def read() -> Operators:
        seconds, calls = forward.frame.profile(True), _native_calls(forward)
        for name, spent_s in seconds.items():
            watch.add(name, calls[name], spent_s)
        return watch.read()

    return read


def _native_calls(forward: NativeForward) -> Counter[str]:
    """How often each operator occurs in a step."""
    if forward.whole is not None:
        return Counter(op.name for op in forward.whole.ops)
    return Counter(op.name for stage in forward.stages for op in stage)


def _time_layers(runner: TorchRunner, watch: Stopwatch, put: Put) -> None:
    """Replace torch layers by timed copies that share their weights."""
    decoder, forward = runner.decoder, runner.decoder.forward
    assert isinstance(forward, TorchForward)  # by _check_can_time
    body = forward.body
    blocks = [watch.timed("residual", _timed_block(block, watch)) for block in body.blocks]
    timed: dict[str, Any] = {"blocks": tuple(blocks), "norm": watch.timed("norm", body.norm)}
    put(forward, "body", dataclasses.replace(body, **timed))
    put(decoder, "forward", watch.timed("embed", forward))
    put(runner, "attention", _TimedAttention(watch, runner.attention))


def _timed_block(block: Block, watch: Stopwatch) -> Block:
    timed, of = copy(block), watch.timed
    timed.attention_norm, timed.mlp_norm, *branch_norms = (
        norm if norm is no_norm else of("norm", norm)
        for norm in (block.attention_norm, block.mlp_norm, *block.branch_norms)
    )
    timed.branch_norms = branch_norms[0], branch_norms[1]
    layer: Any = copy(block.attention)
    for name in ("q_down", "q", "kv_down") if isinstance(layer, LatentAttention) else ("qkv",):
        setattr(layer, name, of("qkv", getattr(layer, name)))
    layer.o = of("o", layer.o)
    attention: Any = of("rope", layer)
    timed.attention = attention
    timed.mlp = _timed_mlp(block.mlp, watch)
    return timed


def _timed_mlp(mlp: Any, watch: Stopwatch) -> Callable[..., Any]:
    if not isinstance(mlp, GatedMlp | UngatedMlp):
        return watch.timed("router+experts", mlp)
    timed: Any = copy(mlp)
    first = "gate_up" if isinstance(mlp, GatedMlp) else "up"
    setattr(timed, first, watch.timed("gate_up", getattr(mlp, first)))
    timed.down = watch.timed("down", mlp.down)
    return watch.timed("activation", timed)
