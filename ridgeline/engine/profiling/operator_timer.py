"""Where a step's time goes inside the engine: its operators timed while it runs as ever.

Native layers time their own operators (`FusedFrame.profile`: each from the end of the one before it
to its own, by the clock of whichever thread ends it). Everything else is wrapped: layers of torch,
attention that is not part of a segment, the LM head, sampling. A call within a timed call is taken
out of the outer one, so that no time counts twice.

Operators are named by their work (`ridgeline.modelspec.cost.operators`).
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from ridgeline.engine.attention.native import NativeAttention
from ridgeline.engine.execution.greedy_fast_path import NativeGreedy
from ridgeline.engine.execution.layers.native import NativeForward
from ridgeline.engine.execution.layers.torch_ops import TorchForward
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.model.layers import Block, GatedMlp, no_norm
from ridgeline.engine.sampling.likeliest import ThroughKeptLogits
from ridgeline.engine.scheduler.plan import Run
from ridgeline.errors import CannotRun
from ridgeline.records import OperatorTime

ROWS = "norm+residual+quantise"
NATIVE_NAMES = MappingProxyType(
    {
        "norm": ROWS,
        "norm+quantise": ROWS,
        "quantise": ROWS,
        "turn": "rope",
        "turn, store": "rope+kv_write",
        "attend": "attention",
        "gate+quantise": "activation",
        "experts": "router+experts",
    }
)
"""A segment's operators by their work; those that are left out have the same name."""

Clock = Callable[[], float]
Operators = dict[str, OperatorTime]


class Stopwatch:
    """Seconds by name since they were last read; what runs inside a timed call is its own."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._inner: list[float] = []  # seconds of timed calls within each open one
        self._found: Operators = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, each run of it counted under `name`."""

        def wrapped(*args: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            begun = self.clock()
            try:
                return call(*args, **named)
            finally:
                took = self.clock() - begun
                self.add(name, 1, took - self._inner.pop())
                if self._inner:
                    self._inner[-1] += took

        return wrapped

    def add(self, name: str, calls: int, time_s: float) -> None:
        before = self._found.get(name, OperatorTime(0, 0.0))
        self._found[name] = OperatorTime(before.calls + calls, before.time_s + time_s)

    def read(self) -> Operators:
        """What was found; begins anew."""
        found, self._found = self._found, {}
        return found


@contextmanager
def operators_timed(runner: TorchRunner, watch: Stopwatch) -> Iterator[Callable[[], Operators]]:
    """Within it the runner's operators are timed; call what it gives after each step.

    Raises CannotRun off the CPU: calls there only queue work.
    """
    _check(runner)
    with ExitStack() as stack:
        put = partial(_put, stack)
        _time_choice(runner, watch, put)
        forward = runner.decoder.forward
        if isinstance(forward, NativeForward):
            yield _time_segments(forward, runner, watch, stack)
        else:
            _time_layers(runner, watch, put)
            yield watch.read


def _check(runner: TorchRunner) -> None:
    decoder = runner.decoder
    if decoder.device.type != "cpu":
        raise CannotRun(
            "a step is timed operator by operator on the CPU only: elsewhere calls queue work",
            value=str(decoder.device),
            fix="take a trace with Nsight Systems and give it to: ridgeline diagnose --nsight FILE",
        )
    if not isinstance(decoder.forward, NativeForward | TorchForward):
        raise CannotRun(
            "these layers cannot be timed by operator", value=type(decoder.forward).__name__
        )


Put = Callable[[object, str, object], None]


def _put(stack: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute until the stack is left. A method is shadowed, and then seen again."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, getattr(owner, name))
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _time_choice(runner: TorchRunner, watch: Stopwatch, put: Put) -> None:
    """The LM head and what chooses tokens from its logits, on every way of a step."""
    decoder, likeliest, greedy = runner.decoder, runner.likeliest, runner.greedy
    put(decoder, "lm_head", watch.timed("lm_head", decoder.lm_head))
    put(runner, "_sample", watch.timed("sampling", runner._sample))
    if isinstance(likeliest, ThroughKeptLogits):
        put(likeliest, "head", _TimedHead(watch, likeliest.head))
    choice = _TimedChoice(watch, likeliest)
    put(runner, "likeliest", choice)
    if isinstance(greedy, NativeGreedy):
        put(greedy, "likeliest", choice)


class _TimedHead:
    def __init__(self, watch: Stopwatch, head: Any) -> None:
        self.between = watch.timed("lm_head", head.between)


class _TimedChoice:
    def __init__(self, watch: Stopwatch, likeliest: Any) -> None:
        self._call = watch.timed("sampling", likeliest)
        if isinstance(likeliest, ThroughKeptLogits):
            self.at = watch.timed("sampling", likeliest.at)

    def __call__(self, x_SC: torch.Tensor) -> list[int]:
        found: list[int] = self._call(x_SC)
        return found


class _TimedAttention:
    """Attention that stands outside the layers' segments; it stores keys and values itself."""

    def __init__(self, watch: Stopwatch, attention: Any) -> None:
        self._watch, self._attention = watch, attention

    def prepare(self, runs: Sequence[Run]) -> Callable[..., Any]:
        return self._watch.timed("attention+kv_write", self._attention.prepare(runs))


def _time_segments(
    forward: NativeForward, runner: TorchRunner, watch: Stopwatch, stack: ExitStack
) -> Callable[[], Operators]:
    """Native layers time their own operators; attention apart from them is wrapped."""
    if not isinstance(runner.attention, NativeAttention):
        _put(stack, runner, "attention", _TimedAttention(watch, runner.attention))
    forward.frame.profile(True)
    stack.callback(forward.frame.profile, False)

    def read() -> Operators:
        seconds, calls = forward.frame.profile(True), _native_calls(forward)
        for name, spent_s in seconds.items():
            watch.add(NATIVE_NAMES.get(name, name), calls[name], spent_s)
        return watch.read()

    return read


def _native_calls(forward: NativeForward) -> Counter[str]:
    """How often each operator is in a step."""
    if forward.whole is not None:
        return Counter(op.name for op in forward.whole.ops)
    return Counter(op.name for stage in forward.stages for op in stage)


def _time_layers(runner: TorchRunner, watch: Stopwatch, put: Put) -> None:
    """Layers of torch: copies of the blocks whose parts are timed; weights are shared."""
    decoder, forward = runner.decoder, runner.decoder.forward
    body = forward.body  # type: ignore[attr-defined]
    blocks = tuple(watch.timed("residual", _timed_block(block, watch)) for block in body.blocks)
    norm = watch.timed("norm", body.norm)
    put(forward, "body", dataclasses.replace(body, blocks=blocks, norm=norm))
    put(decoder, "forward", watch.timed("embed", forward))
    put(runner, "attention", _TimedAttention(watch, runner.attention))


def _timed_block(block: Block, watch: Stopwatch) -> Block:
    timed, of = copy(block), watch.timed
    timed.attention_norm = of("norm", block.attention_norm)
    timed.mlp_norm = of("norm", block.mlp_norm)
    first, second = (each if each is no_norm else of("norm", each) for each in block.branch_norms)
    timed.branch_norms = first, second
    layer: Any = copy(block.attention)
    layer.qkv, layer.o = of("qkv", layer.qkv), of("o", layer.o)
    attention: Any = of("rope", layer)
    timed.attention = attention
    timed.mlp = _timed_mlp(block.mlp, watch)
    return timed


def _timed_mlp(mlp: Any, watch: Stopwatch) -> Callable[..., Any]:
    if not isinstance(mlp, GatedMlp):
        return watch.timed("router+experts", mlp)
    timed: Any = copy(mlp)
    timed.gate_up = watch.timed("gate_up", mlp.gate_up)
    timed.down = watch.timed("down", mlp.down)
    return watch.timed("activation", timed)
