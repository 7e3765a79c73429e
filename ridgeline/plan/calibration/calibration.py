"""The step-time model of an engine on one machine, fitted to a few short runs.

    t = Σ over weight formats of products(format, rows) + attention + overhead

    products    (memory^p + arithmetic^p)^(1/p): memory is the bytes of the weights over the read
                bandwidth for a working set of this size; arithmetic is the number of weights times
                the seconds per weight, a curve over the number of rows (kernels that unpack each
                weight do not reach a constant share of a peak). p says how far the two overlap
    attention   decodes by FLOP and by byte of KV cache, overlapping like products; prompts by FLOP
    overhead    a + b · runs + c · runs · layers + d · logits + g · admitted sequences, and per
                weight format e · layers + f · product outputs (small matrices have more of them)

Compared with the shares in `efficiency.toml`, it covers small models that fit a cache, replaces a
share by a curve, and adds overhead per row and per run. It is fitted by
`ridgeline.plan.calibration.fit` and stored as JSON.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput, CannotRun
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.hardware.machine import rate_at
from ridgeline.plan.calibration.interference import InterferenceTrace, Positive

FORMAT = 2  # version of the calibration file that `calibrate --engine` writes
SERVER = "server"  # `kind` in the calibration files that `calibrate --url` writes


class ProductWork(msgspec.Struct, frozen=True):
    """Matrix products of a step in one format: `weights` weights, each times `rows` rows."""

    format: str
    weights: float
    nbytes: float
    rows: float


class CalibratedWork(msgspec.Struct, frozen=True, kw_only=True):
    """The quantities of one step from which a calibration computes its time.

    `decode_*`: attention of runs with one new token; `prompt_flops`: attention of the other runs.
    `weight_set_bytes`: bytes of weights read every step, which decide the cache level they come
    from. `layer_format`: format of the layers' weights; `num_outputs`: values written by their
    products. `num_begun`: runs with nothing in the cache, i.e. sequences admitted in this step.
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
    """Time of matrix products in one weight format.

    `row_s`: seconds per weight and row at the arithmetic peak. `weight_s[i]`: seconds per weight in
    excess of that when it multiplies `rows[i]` rows (ascending). `bandwidth`: share of the read
    bandwidth that these kernels reach. `layer_s`: overhead per layer; `output_s`: per output value.
    """

    rows: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1)], ...], msgspec.Meta(min_length=1)]
    weight_s: tuple[Positive, ...]
    row_s: Seconds
    bandwidth: Positive
    layer_s: Seconds
    output_s: Seconds

    def seconds_per_weight(self, rows: float) -> float:
        """Seconds of arithmetic for one weight that multiplies `rows` rows."""
        return self.row_s * rows + self._above_peak(rows)

    def _above_peak(self, rows: float) -> float:
        """Log-log interpolation between the knots; proportional to `rows` beyond the last."""
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
    """Attention: seconds per FLOP and per KV cache byte of decodes, and per FLOP of prompts."""

    decode_flop_s: Seconds
    decode_byte_s: Seconds
    prompt_flop_s: Seconds


class Overheads(msgspec.Struct, frozen=True):
    """Overheads in seconds: per step, per run, per run and layer, per logit.

    `first_s`: from a request's arrival to its first step, plus from that step's end to the reader.
    `reader_s`, `reader_first_s`: the same costs when an event loop in the engine process reads each
    token as it is produced, as servers and load clients do: added to the step per token, and in
    place of `first_s`. `Calibration.priced` leaves them out; simulations of served loads add them.
    """

    step_s: Seconds
    run_s: Seconds
    run_layer_s: Seconds
    logit_s: Seconds
    first_s: Seconds
    reader_s: Seconds = 0.0
    reader_first_s: Seconds = 0.0
    begun_s: Seconds = 0.0  # per sequence in its first step, in which its request is admitted


class ReaderTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of reading tokens in an event loop: seconds per token of a step, and seconds from the
    request to its first token beyond the step itself."""

    token_s: float
    first_s: float


class MachineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's memory, and the part that was available before a model was loaded."""

    total_bytes: int
    available_bytes: int


class Residual(msgspec.Struct, frozen=True, kw_only=True):
    """One fitted step: a description, and measured and fitted seconds."""

    what: str
    measured_s: float
    fitted_s: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The step-time model of an engine on one machine; the content of a calibration file.

    `dense_dtype`: the engine's dtype for everything that is not quantised. `bandwidth_bytes_s`:
    read bandwidth by working set size in bytes. `overlap`: the exponent p. `tpot_error`,
    `ttft_error`: expected median relative errors, from the residuals of decode and prompt steps.
    `interference`: how much slower than fitted the steps were under load; simulations replay it.
    `device_kind`: what the steps ran on; a GPU is an NVIDIA card.
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
    device_kind: Literal["cpu", "gpu"] = "cpu"

    def bandwidth(self, set_bytes: float) -> float:
        """Bytes/s at which a working set of this size is read repeatedly."""
        rates = {int(size): rate for size, rate in self.bandwidth_bytes_s.items()}
        return rate_at(rates, set_bytes)

    @property
    def memory_bandwidth(self) -> float:
        return self.bandwidth(math.inf)

    def accelerator(self) -> MeasuredDevice:
        """The device as a row of the catalogue, without a price."""
        return MeasuredDevice(
            name=self.device,
            vendor="measured" if self.device_kind == "cpu" else "NVIDIA",
            kind=self.device_kind,
            peak_flops=self.peak_flops,
            memory_bytes=self.memory.total_bytes,
            bandwidth_bytes_s=self.memory_bandwidth,
            source=self.source,
            as_of=self.as_of,
            calibration=self,
        )

    def priced(self, work: CalibratedWork) -> StepSeconds:
        """Seconds of one step. Its weight formats must have been calibrated (`linear`)."""
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
        """The times of a weight format. Raises CannotRun if it was not calibrated."""
        times = self.linears.get(weight_format)
        if times is None:
            raise CannotRun(
                "the calibration does not cover this weight format",
                value=weight_format,
                limit=", ".join(self.linears),
                fix="calibrate again with a model in this format (--also MODEL=FORMAT)",
            )
        return times


class MeasuredDevice(Accelerator, frozen=True, kw_only=True):
    """A catalogue row with a calibration, which replaces the published shares in predictions."""

    calibration: Calibration


class StepSeconds(msgspec.Struct, frozen=True):
    """Seconds of a step: memory alone, arithmetic alone, both with overlap, and overhead."""

    memory_s: float
    compute_s: float
    busy_s: float
    overhead_s: float


def overlapped(a: float, b: float, overlap: float) -> float:
    """(a^p + b^p)^(1/p): the sum for p = 1, the maximum for p → ∞."""
    large, small = (a, b) if a >= b else (b, a)
    return large * (1.0 + (small / large) ** overlap) ** (1.0 / overlap) if large > 0 else 0.0


def is_server_calibration(path: Path) -> bool:
    """True if the file was written by `calibrate --url`; False if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_FileKind).kind == SERVER
    except (OSError, *DECODE_ERRORS):
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
    except (OSError, *DECODE_ERRORS) as error:
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
    except DECODE_ERRORS as error:
        raise BadInput("cannot read the calibration", value=str(path), fix=str(error)) from None
    _check(calibration, path)
    return calibration


def _check(calibration: Calibration, path: Path) -> None:
    # Constraints that the field types cannot express.
    if not all(size.isdecimal() for size in calibration.bandwidth_bytes_s):
        raise BadInput(
            "the calibration's bandwidth_bytes_s has keys that are not bytes", value=str(path)
        )
    for name, linear in calibration.linears.items():
        is_ascending = list(linear.rows) == sorted(set(linear.rows))
        if len(linear.rows) != len(linear.weight_s) or not is_ascending:
            fix = "rows must ascend, with one entry of weight_s each"
            raise BadInput(f"the calibration of {name} is malformed", value=str(path), fix=fix)
