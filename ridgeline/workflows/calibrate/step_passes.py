"""What `ridgeline calibrate` runs: short passes over the kinds of steps that an engine takes.

A run is one model in one weight format. What is measured is kept raw (`Ran`), so that runs made
apart can be fitted together: `benchmarks/bench_predict.py` does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, median

import msgspec

from ridgeline.config.settings import Settings, settings_from
from ridgeline.errors import BadInput
from ridgeline.hardware import measure, system
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost import kv_bytes_per_token
from ridgeline.workflows.calibrate.step_bench import Measured, Rig

FIRSTS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
DEEP = ((256, 1024), (64, 1024))  # (new tokens, tokens in the cache)
DECODES = (
    *((1, 32), (8, 32), (1, 1536), (64, 32), (8, 1024)),
    *((2, 32), (32, 32), (4, 32), (16, 32), (32, 512)),
)  # (batch, context)
STREAMED = ((1, 32), (8, 32), (64, 32))  # of DECODES, and of the small model alone
MOST_PASSES = 4  # over all kinds, while there is time: see `quietest`
LEAST_KINDS = 4  # of steps in a pass, to tell a mood
LENGTH = 2048
MANY, SHORT_S, FEW, LONG_S = 9, 0.03, 3, 0.3  # repetitions of short steps and of others; long: 1
SMALL = "demo"  # fits into a cache: shows what a large model hides, the overheads
MOST_TOKENS = 128  # that a measured decode writes
MOST_KV = 0.25  # of the free memory, for the cache
FORMATS = {"int8": "int8", "int4": "int4", "bf16": "bfloat16"}


class Speed(msgspec.Struct, frozen=True):
    """Memory reads in bytes/s and arithmetic in operations/s: shared machines have moods."""

    read_bytes_s: float
    ops_s: float

    def middle(self, other: Speed) -> Speed:
        return Speed((self.read_bytes_s + other.read_bytes_s) / 2, (self.ops_s + other.ops_s) / 2)


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of step of one engine, raw; `seconds` is a median. `kind`: first, decode, streamed,
    ttft or asked.

    ttft: what asking costs besides the step, as a step without runs; asked: the same where an event
    loop reads. streamed: as decode, its tokens read by an event loop as they come. `asked`: what of
    the kind was wanted, the same in every pass. `speed`: the machine's before that pass.
    """

    model: str
    quantization: str | None
    kind: str
    asked: tuple[int, int]
    shapes: tuple[tuple[int, int], ...]
    num_sampled: int
    seconds: float
    speed: Speed


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a weight format (None: as the engine keeps it)."""

    model: str
    quantization: str | None

    def __str__(self) -> str:
        return f"{self.model} {self.quantization or 'dense'}"


def runs_of(model: str, formats: str | None, also: Sequence[str] = ()) -> tuple[Run, ...]:
    """A small model for the overheads, what `also` names as MODEL=FORMAT, and the model in the
    formats named (dense, int8, int4, bf16). The last one runs under arrivals."""
    names = [name.strip() for name in (formats or "dense,int8,int4").split(",")]
    runs = [run_of(model, name) for name in names]
    small = [] if model == SMALL else [Run(model=SMALL, quantization=runs[0].quantization)]
    if small and formats is None:
        small.append(Run(model=SMALL, quantization="int8"))
    return tuple(dict.fromkeys((*small, *map(_also, also), *runs)))


def run_of(model: str, name: str) -> Run:
    """The model in a format by its name here."""
    if name not in ("dense", *FORMATS):
        raise BadInput("unknown format", value=name, limit=", ".join(("dense", *FORMATS)))
    return Run(model=model, quantization=None if name == "dense" else name)


def _also(named: str) -> Run:
    model, told, name = named.rpartition("=")
    if not told:
        raise BadInput("--also needs MODEL=FORMAT", value=named, limit="demo=int8, for one")
    return run_of(model, name)


def settings_of(run: Run, kv_bytes: int | None = None) -> Settings:
    """With cache enough for every measured context, as far as a share of the free memory goes,
    unless `kv_bytes` says how much."""
    spec = load_planning_spec(run.model)
    row = kv_bytes_per_token(msgspec.structs.replace(spec, kv_dtype="float32"))
    most = row * max(batch * (context + MOST_TOKENS) for batch, context in DECODES)
    roomy = int(MOST_KV * system.memory().available_bytes)
    return settings_from(
        {
            "model": run.model,
            "quantization": run.quantization,
            "kv_cache_memory_bytes": kv_bytes or max(1 << 29, min(most, roomy)),
            "max_model_len": min(LENGTH, spec.max_positions),
        }
    )


Kind = tuple[str, tuple[int, int], Callable[[], Measured]]


class Clock:
    """Times kinds of steps, after a look at the machine's speed."""

    def __init__(self, run: Run) -> None:
        self._run, self._speed = run, speed()

    def timed(self, kind: str, asked: tuple[int, int], measured: Callable[[], Measured]) -> Ran:
        found = measured()
        return Ran(
            model=self._run.model,
            quantization=self._run.quantization,
            kind=kind,
            asked=asked,
            shapes=found.shapes,
            num_sampled=found.num_sampled,
            seconds=found.seconds,
            speed=self._speed,
        )


def kinds_of(bench: Rig, run: Run) -> Iterator[Kind]:
    """All of one pass, most telling first. What readers cost shows where steps are short. Decodes
    for which the cache is too small are left out."""
    resolved = bench.engine.resolved
    room = resolved.num_blocks * resolved.block_size
    decodes = [shape for shape in DECODES if shape[0] * (shape[1] + MOST_TOKENS) <= room]
    yield "ttft", (0, 0), lambda: _asking(bench, bench.ttft_s)
    if run.model == SMALL:
        yield "asked", (0, 0), lambda: _asking(bench, bench.streamed_ttft_s)
    for shape in decodes[:5]:
        yield "decode", shape, partial(bench.decode, *shape)
        if run.model == SMALL and shape in STREAMED:
            yield "streamed", shape, partial(bench.streamed, *shape)
    for shape in (*((n, 0) for n in FIRSTS), *DEEP):
        yield "first", shape, partial(often, partial(bench.first, *shape))
    for shape in decodes[5:]:
        yield "decode", shape, partial(bench.decode, *shape)


def measure_run(bench: Rig, run: Run, budget_s: float) -> Iterator[Ran]:
    """As many passes over all kinds as fit the budget, and no more than `MOST_PASSES`."""
    ends_s = time.perf_counter() + budget_s
    for _ in range(MOST_PASSES):
        if time.perf_counter() >= ends_s:
            return
        clock = Clock(run)
        for kind, asked, measured in kinds_of(bench, run):
            if time.perf_counter() < ends_s:
                yield clock.timed(kind, asked, measured)


def quietest(ran: Sequence[Ran]) -> list[Ran]:
    """Of each kind the fastest pass. A neighbour on the other thread of a core makes a step up to
    twice as long for seconds and never shorter, so that passes differ by a sixth at the median:
    their middle is the luck of the minute, their least is the machine."""
    best: dict[tuple[object, ...], Ran] = {}
    for each in ran:
        key = (each.model, each.quantization, each.kind, each.asked)
        if key not in best or each.seconds < best[key].seconds:
            best[key] = each
    return list(best.values())


def moods(ran: Sequence[Ran]) -> tuple[float, ...]:
    """The machine's, from minute to minute: seconds of each pass of each run over those of all
    passes (geometric mean), the middle of its kinds; () where no run has two passes.

    Of each run decodes and prompts make a mood of their own: they are some seconds apart.
    """
    visits: dict[tuple[object, ...], list[float]] = {}
    for each in ran:
        if each.kind in ("first", "decode"):
            key = (each.model, each.quantization, each.kind, each.asked)
            visits.setdefault(key, []).append(each.seconds)
    passes: dict[tuple[object, ...], list[float]] = {}
    for kind, seconds in visits.items():
        for i, took_s in enumerate(seconds if len(seconds) > 1 else ()):
            passes.setdefault((*kind[:3], i), []).append(took_s / min(seconds))
    slow = [median(of) for of in passes.values() if len(of) >= LEAST_KINDS]
    if not slow:
        return ()
    middle = math.exp(fmean(map(math.log, slow)))
    return tuple(round(each / middle, 4) for each in slow)


def often(measured: Callable[[], Measured]) -> Measured:
    """The middle of several, and long ones once: a pass is soon over, and another follows."""
    found = [measured()]
    if found[0].seconds > LONG_S:
        return found[0]
    times = MANY if found[0].seconds < SHORT_S else FEW
    while len(found) < times:
        found.append(measured())
    return sorted(found, key=lambda each: each.seconds)[len(found) // 2]


def _asking(bench: Rig, ttft_s: Callable[[int], float]) -> Measured:
    """What asking costs besides the step."""
    bench.first(16)  # what is set up once is paid here
    asked = median(ttft_s(16) for _ in range(5))
    step = median(bench.first(16).seconds for _ in range(5))
    return Measured((), 0, max(0.0, asked - step))


def num_threads() -> int:
    """Of measurements: all cores that this process may use."""
    return max(1, int(system.cores().usable))


def speed() -> Speed:
    """The machine's at this moment, in a quarter of a second."""
    threads, native = num_threads(), measure.native()
    reads = native.read_rates(256 << 20, threads, 5, 0.01)
    ops = native.multiply_rates("float32", threads, 5, 0.01)
    return Speed(median(rate for rate, _ in reads), median(rate for rate, _ in ops))
