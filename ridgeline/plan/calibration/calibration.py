"""A device as measured: the step-time model of an engine, fitted to a few short runs of it.

    t = Σ over weight formats of products(format, rows) + attention + overhead

    products    (memory^p + arithmetic^p)^(1/p): the bytes of the weights over the bandwidth that a
                working set of this size is read with, and the weights times the seconds that one of
                them takes with so many rows (a curve: a kernel that unpacks a weight once for many
                rows, or for one, is not a constant share of a peak). p: how far the two overlap
    attention   decodes by FLOP and by byte of KV cache, which overlap as products do; prompts by
                FLOP
    overhead    a + b · runs + c · runs · layers + d · logits + g · sequences that begin, and for a
                layer in each format e · layers + f · outputs of products: small matrices have more
                of them

What it adds to `efficiency`: small models that live in a cache, a curve instead of a share, rows
and runs that cost time of their own. It is fitted by `ridgeline.plan.calibration.fit` and kept as JSON.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from pathlib import Path
from typing import Annotated

import msgspec

from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.hardware.machine import rate_at
from ridgeline.plan.calibration.interference import InterferenceTrace, Positive

FORMAT = 2  # version of the calibration file that `calibrate --engine` writes
SERVER = "server"  # `kind` in the calibration files that `calibrate --url` writes


class ProductWork(msgspec.Struct, frozen=True):
    """Matrix products of one step in one format: `weights` numbers, each met by `rows` rows."""

    format: str
    weights: float
    nbytes: float
    rows: float


class CalibratedWork(msgspec.Struct, frozen=True, kw_only=True):
    """One step's work, as far as a calibrated device is concerned.

    `decode_*`: attention of runs with one new token, `prompt_flops` that of the others.
    `weight_set_bytes`: what is read over and over, which decides from where it comes.
    `layer_format`: of the layers' weights; `num_outputs`: numbers that their products write.
    `num_begun`: runs with nothing in the cache: sequences that are admitted in this step.
    `num_logits`: sampled rows times vocabulary.
    """

    products: tuple[ProductWork, ...]
    weight_set_bytes: float
    decode_flops: float
    decode_kv_bytes: float
    prompt_flops: float
    layer_format: str
    num_layers: int
    num_runs: int
    num_begun: int
    num_logits: float
    num_outputs: float


Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ProductTimes(msgspec.Struct, frozen=True, kw_only=True):
    """`weight_s[i]`: seconds per weight that meets `rows[i]` rows, ascending, over and above those
    of the arithmetic at its peak, `row_s` per row.

    `bandwidth`: share of the read bandwidth that these kernels reach. `layer_s`: seconds of a layer
    of them; `output_s`: of a number that a product writes.
    """

    rows: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1)], ...], msgspec.Meta(min_length=1)]
    weight_s: tuple[Positive, ...]
    row_s: Seconds
    bandwidth: Positive
    layer_s: Seconds
    output_s: Seconds

    def seconds_per_weight(self, rows: float) -> float:
        """All arithmetic of a weight that meets `rows` rows."""
        return self.row_s * rows + self._above_peak(rows)

    def _above_peak(self, rows: float) -> float:
        """Straight between the knots on logarithmic scales; beyond the last, by row."""
        known, times = self.rows, self.weight_s
        if rows >= known[-1]:
            return times[-1] * rows / known[-1]
        if rows <= known[0]:
            return times[0]
        above = bisect_right(known, rows)
        low, high = known[above - 1], known[above]
        share = math.log(rows / low) / math.log(high / low)
        return times[above - 1] * float((times[above] / times[above - 1]) ** share)


class AttentionTimes(msgspec.Struct, frozen=True):
    """Seconds per FLOP of decodes, per byte of KV cache that they read, per FLOP of prompts."""

    decode_flop_s: Seconds
    decode_byte_s: Seconds
    prompt_flop_s: Seconds


class Overheads(msgspec.Struct, frozen=True):
    """Seconds; see the head of this file. `first_s`: from a request's arrival to its first step and
    from that step's end to the reader, together.

    `reader_s`, `reader_first_s`: where an event loop of the engine process reads each token as it
    comes, as servers and load clients do: what a token adds to its step, and `first_s` there. They
    are no part of `priced`: simulations, which are of served loads, add them.
    """

    step_s: Seconds
    run_s: Seconds
    run_layer_s: Seconds
    logit_s: Seconds
    first_s: Seconds
    reader_s: Seconds = 0.0
    reader_first_s: Seconds = 0.0
    begun_s: Seconds = 0.0  # of a sequence in its first step: its request is admitted there


class ReaderTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What reading costs where an event loop does it: seconds of a step per token that it gives,
    and from asking to the first token, besides its step."""

    token_s: float
    first_s: float


class MachineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the machine, and of those free before a model was loaded."""

    total_bytes: int
    available_bytes: int


class Residual(msgspec.Struct, frozen=True, kw_only=True):
    """One fitted step: what was run, in words, and the model's seconds against the clock's."""

    what: str
    measured_s: float
    fitted_s: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """See the head of this file; written and read as JSON.

    `dense_dtype`: what the engine keeps and computes in where nothing is quantised.
    `bandwidth_bytes_s`: read bandwidth by working set in bytes. `overlap` is p. `tpot_error`,
    `ttft_error`: median relative errors to expect, from the residuals of decode and prompt steps.
    `weather`: what steps under arrivals took (`ridgeline.plan.calibration.interference`); simulations play it.
    """

    version: int
    device: str
    as_of: str
    source: str
    took_s: float
    runs: tuple[str, ...]
    peak_flops: dict[str, Positive]
    bandwidth_bytes_s: Annotated[dict[str, Positive], msgspec.Meta(min_length=1)]
    overlap: Positive
    linears: dict[str, ProductTimes]
    attention: AttentionTimes
    overheads: Overheads
    memory: MachineMemory
    tpot_error: float
    ttft_error: float
    dense_dtype: str
    residuals: tuple[Residual, ...] = ()
    interference: InterferenceTrace | None = None

    def bandwidth(self, set_bytes: float) -> float:
        """Bytes/s for a working set read over and over."""
        rates = {int(size): rate for size, rate in self.bandwidth_bytes_s.items()}
        return rate_at(rates, set_bytes)

    @property
    def memory_bandwidth(self) -> float:
        return self.bandwidth(math.inf)

    def accelerator(self) -> MeasuredDevice:
        """The device as a row of the catalogue, without a price."""
        return MeasuredDevice(
            name=self.device,
            vendor="measured",
            kind="cpu",
            peak_flops=self.peak_flops,
            memory_bytes=self.memory.total_bytes,
            bandwidth_bytes_s=self.memory_bandwidth,
            source=self.source,
            as_of=self.as_of,
            calibration=self,
        )

    def priced(self, work: CalibratedWork) -> StepSeconds:
        """Seconds of one step; its formats are known (`linear`)."""
        memory_s = compute_s = products_s = 0.0
        rate = self.bandwidth(work.weight_set_bytes)
        for part in work.products:
            linear = self.linears[part.format]
            by_memory = part.nbytes / (rate * linear.bandwidth)
            by_compute = part.weights * linear.seconds_per_weight(part.rows)
            memory_s += by_memory
            compute_s += by_compute
            products_s += overlapped(by_memory, by_compute, self.overlap)
        attend, over = self.attention, self.overheads
        read_s = attend.decode_byte_s * work.decode_kv_bytes
        multiplied_s = attend.decode_flop_s * work.decode_flops
        decode_s = overlapped(read_s, multiplied_s, self.overlap)
        fresh_s = attend.prompt_flop_s * work.prompt_flops
        layers = self.linears[work.layer_format]
        overhead_s = over.step_s + over.logit_s * work.num_logits
        overhead_s += (over.run_s + over.run_layer_s * work.num_layers) * work.num_runs
        overhead_s += over.begun_s * work.num_begun
        overhead_s += layers.layer_s * work.num_layers + layers.output_s * work.num_outputs
        return StepSeconds(
            memory_s=memory_s + read_s,
            compute_s=compute_s + multiplied_s + fresh_s,
            busy_s=products_s + decode_s + fresh_s,
            overhead_s=overhead_s,
        )

    def linear(self, weight_format: str) -> ProductTimes:
        """The curve of a weight format; CannotRun for one that was not calibrated."""
        found = self.linears.get(weight_format)
        if found is None:
            raise CannotRun(
                "this calibration has no run with weights in this format",
                value=weight_format,
                limit=", ".join(self.linears),
                fix="calibrate again with an engine that holds weights in it",
            )
        return found


class MeasuredDevice(Accelerator, frozen=True, kw_only=True):
    """A row of the catalogue with its calibration: predictions for it come from that."""

    calibration: Calibration


class StepSeconds(msgspec.Struct, frozen=True):
    """Seconds of a step: of memory and of arithmetic alone, of both as they overlap, and of the
    rest."""

    memory_s: float
    compute_s: float
    busy_s: float
    overhead_s: float


def overlapped(a: float, b: float, overlap: float) -> float:
    """(a^p + b^p)^(1/p): the sum at p = 1, the larger at infinity."""
    large, small = (a, b) if a >= b else (b, a)
    return large * (1.0 + (small / large) ** overlap) ** (1.0 / overlap) if large > 0 else 0.0


def is_server_calibration(path: Path) -> bool:
    """Whether `calibrate --url` wrote this file; False for what cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_FileKind).kind == SERVER
    except (OSError, msgspec.MsgspecError):
        return False


class _FileKind(msgspec.Struct):
    kind: str = "engine"
    version: int = 0


def load_calibration(path: Path) -> Calibration:
    """Read a file written by `ridgeline calibrate --engine`.

    Raises BadInput if it cannot be read or is malformed, CannotRun if it describes a remote server.
    """
    try:
        data = path.read_bytes()
        file = msgspec.json.decode(data, type=_FileKind)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInput("cannot read the calibration", value=str(path), fix=str(error)) from None
    if file.kind == SERVER:
        raise CannotRun(
            "a server calibration covers one server's latencies, not step times or other models",
            value=str(path),
            limit="ridgeline predict",
            fix="use a file written by `ridgeline calibrate --engine`",
        )
    if file.version != FORMAT:
        raise BadInput(
            "the calibration file has an unsupported version",
            value=file.version,
            limit=FORMAT,
            fix="run `ridgeline calibrate` again",
        )
    try:
        calibration = msgspec.json.decode(data, type=Calibration)
    except msgspec.MsgspecError as error:
        raise BadInput("cannot read the calibration", value=str(path), fix=str(error)) from None
    _check(calibration, path)
    return calibration


def _check(found: Calibration, path: Path) -> None:
    """What the types of the fields do not say."""
    if not all(size.isdecimal() for size in found.bandwidth_bytes_s):
        raise BadInput("bandwidth_bytes_s of the calibration is not by bytes", value=str(path))
    for name, linear in found.linears.items():
        is_ascending = list(linear.rows) == sorted(set(linear.rows))
        if len(linear.rows) != len(linear.weight_s) or not is_ascending:
            fix = "one of weight_s for each of rows, which ascend"
            raise BadInput(f"the calibration of {name} is not a curve", value=str(path), fix=fix)
