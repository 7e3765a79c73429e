"""Predict latency, throughput and memory of one operating point, without running anything."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.config.planning import PredictOptions
from ridgeline.errors import BadInput
from ridgeline.modelspec.families.shapes import known_shapes
from ridgeline.plan.calibration.calibration import is_server_calibration
from ridgeline.plan.calibration.remote_server import (
    ServerPrediction,
    ServerTimes,
    load_server_times,
    predict_server_times,
)
from ridgeline.plan.step_time.predict import (
    OperatingPoint,
    Prediction,
    predict,
    predict_lines,
)
from ridgeline.report.result import Result
from ridgeline.workflows.planning.device_catalogue import default_device, read_catalogue


class OperatingPointResult(Result, frozen=True, kw_only=True):
    """The prediction for one operating point.

    `prediction` comes from the roofline model, or, for a calibrated `server`, from the fit to it.
    """

    point: OperatingPoint
    prediction: Prediction | ServerPrediction
    server: ServerTimes | None = None

    def to_dict(self) -> dict[str, object]:
        """The prediction's figures by name."""
        return dict(super().to_dict()["prediction"])


def predict_point(
    point: OperatingPoint, *, catalogue: Path | None = None, calibration: Path | None = None
) -> OperatingPointResult:
    """Predict `point`. Its device defaults to the calibrated one.

    Raises UserError if the point cannot run: a name is unknown, or the model does not fit.
    """
    if calibration is not None and is_server_calibration(calibration):
        if catalogue is not None:
            raise _unused_with_server(str(catalogue), load_server_times(calibration))
        return _predict_server(point, load_server_times(calibration))
    rows = read_catalogue(catalogue, calibration)
    device = default_device(point.device or None, rows)
    if not point.model or device is None:
        raise BadInput(
            "predict needs MODEL and --accelerator, or --input FILE", value=point.model or None
        )
    point = msgspec.structs.replace(point, device=device)
    return OperatingPointResult(point=point, prediction=predict(point, rows))


def operating_point(options: PredictOptions) -> OperatingPoint:
    """The operating point that the options describe."""
    return OperatingPoint(
        model=options.model or "",
        device=options.accelerator or "",
        isl=options.input_len,
        osl=options.output_len,
        batch=options.max_concurrency,
        tp=options.tensor_parallel_size,
        pp=options.pipeline_parallel_size,
        ep=options.expert_parallel_size,
        moe_tp=options.moe_tensor_parallel_size,
        attention_dp=options.attention_dp_size,
        backend=options.backend,
        weight_dtype=options.quantization,
        kv_dtype=options.kv_cache_dtype,
        kv_eviction=options.kv_eviction_config,
        cached=options.cached_tokens,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_speculative_tokens=options.num_speculative_tokens,
        acceptance=options.acceptance,
        draft_model=options.draft_model,
    )


def predict_file(
    source: str, *, catalogue: Path | None = None, calibration: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Predict every line of a JSONL file of operating points; `-` reads stdin.

    A line that cannot be predicted yields its error. Raises BadInput if the file cannot be read.
    """
    rows = read_catalogue(catalogue, calibration)
    points: Iterable[str] = sys.stdin
    if source != "-":
        try:
            points = Path(source).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput("cannot read the points", value=source, fix=str(error)) from None
    return predict_lines(points, lambda point: predict(point, rows))


class KnownNames(Result, frozen=True, kw_only=True):
    """The names that planning accepts without files."""

    models: tuple[str, ...]
    accelerators: tuple[str, ...]


def known_names(*, catalogue: Path | None = None, calibration: Path | None = None) -> KnownNames:
    """Built-in models, and the accelerators of the catalogue."""
    accelerators = read_catalogue(catalogue, calibration)
    return KnownNames(models=tuple(known_shapes()), accelerators=tuple(accelerators))


def _predict_server(point: OperatingPoint, server: ServerTimes) -> OperatingPointResult:
    """From a calibration of a server: only isl, osl and batch can vary."""
    usable = OperatingPoint(
        model=point.model, device="", isl=point.isl, osl=point.osl, batch=point.batch
    )
    names = point.__struct_fields__
    unused = [name for name in names if getattr(point, name) != getattr(usable, name)]
    if unused or point.model not in ("", server.model):
        raise _unused_with_server(", ".join(unused) or point.model, server)
    prediction = predict_server_times(server, point.isl, point.osl, point.batch)
    return OperatingPointResult(point=point, prediction=prediction, server=server)


def _unused_with_server(given: str, server: ServerTimes) -> BadInput:
    return BadInput(
        "the calibration of a server predicts only that server with its model",
        value=given,
        limit="--input-len, --output-len, --max-concurrency",
        fix=f"remove the other options (the server runs {server.model})",
    )
