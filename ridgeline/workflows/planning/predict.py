"""Predict latency, throughput and memory of one operating point, without running anything."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.config.load import OperatorTimes, PredictOptions
from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.hardware.links import with_links
from ridgeline.modelspec.families.shapes import known_shapes
from ridgeline.plan.calibration.calibration import is_server_calibration
from ridgeline.plan.calibration.remote_server import (
    ServerPrediction,
    ServerTimes,
    load_server_times,
    predict_server_times,
)
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.predict import Prediction, predict, predict_lines
from ridgeline.plan.step_time.tier_loads import TierHits, require_no_rates, tier_hits
from ridgeline.plan.step_time.waterfall import Waterfall, waterfall
from ridgeline.report.result import Result
from ridgeline.workflows.planning.device_catalogue import default_device, read_catalogue


class PredictSources(msgspec.Struct, frozen=True, kw_only=True):
    """Where the figures of a prediction come from; None: the built-in ones."""

    catalogue: Path | None = None
    calibration: Path | None = None
    interconnect: str | None = None
    network: str | None = None
    operators: OperatorTimes = "analytic"

    @property
    def measured(self) -> bool:
        """Whether operators take times that were measured."""
        return self.operators == "measured"

    @property
    def given(self) -> list[str]:
        """The flags of those that are set."""
        files = ("catalogue", "calibration", "interconnect", "network")
        names = [name for name in files if getattr(self, name) is not None]
        return [f"--{name}" for name in (*names, *["operators"] * self.measured)]

    def devices(self) -> dict[str, Accelerator]:
        """The accelerators by name. Raises BadInput."""
        rows = read_catalogue(self.catalogue, self.calibration)
        return with_links(rows, self.interconnect, self.network)


class OperatingPointResult(Result, frozen=True, kw_only=True):
    """The prediction for one operating point.

    `prediction` comes from the roofline model, or, for a calibrated `server`, from the fit to it.
    `waterfall`: the terms of the prediction, if they were wanted.
    """

    point: OperatingPoint
    prediction: Prediction | ServerPrediction
    server: ServerTimes | None = None
    waterfall: Waterfall | None = None

    def to_dict(self) -> dict[str, object]:
        """The prediction's figures by name, and its `waterfall` if it was wanted."""
        fields = super().to_dict()
        figures = dict(fields["prediction"])
        return figures if self.waterfall is None else {**figures, "waterfall": fields["waterfall"]}


def predict_point(
    point: OperatingPoint, sources: PredictSources | None = None, *, explain: bool = False
) -> OperatingPointResult:
    """Predict `point`, and `explain` it by its terms. Its device defaults to the calibrated one.

    Raises UserError if the point cannot run: a name is unknown, or the model does not fit.
    """
    sources = sources or PredictSources()
    calibration = sources.calibration
    if calibration is not None and is_server_calibration(calibration):
        others = msgspec.structs.replace(sources, calibration=None)
        unused = ["--explain"] * explain + others.given
        if unused:
            raise _unused_with_server(", ".join(unused), load_server_times(calibration))
        return _predict_server(point, load_server_times(calibration))
    rows = sources.devices()
    device = default_device(point.device or None, rows)
    if not point.model or device is None:
        raise BadInput(
            "predict needs MODEL and --accelerator, or --input FILE", value=point.model or None
        )
    point = msgspec.structs.replace(point, device=device)
    measured = sources.measured
    prediction = predict(point, rows, measured=measured)
    terms = waterfall(point, prediction, rows, measured=measured) if explain else None
    return OperatingPointResult(point=point, prediction=prediction, waterfall=terms)


def sources_of(options: PredictOptions) -> PredictSources:
    """Where the options say that the figures come from."""
    return PredictSources(
        catalogue=options.catalogue,
        calibration=options.calibration,
        interconnect=options.interconnect,
        network=options.network,
        operators=options.operators,
    )


def operating_point(options: PredictOptions) -> OperatingPoint:
    """The operating point that the options describe."""
    return OperatingPoint(
        model=options.model or "",
        device=options.accelerator or "",
        isl=options.input_len,
        osl=_output_len(options),
        batch=options.max_concurrency,
        tp=options.tensor_parallel_size,
        pp=options.pipeline_parallel_size,
        ep=options.expert_parallel_size,
        cp=options.context_parallel_size,
        sp=options.sequence_parallel,
        moe_tp=options.moe_tensor_parallel_size,
        attention_dp=options.attention_dp_size,
        backend=options.backend,
        weight_dtype=options.quantization,
        kv_dtype=options.kv_cache_dtype,
        kv_eviction=options.kv_eviction_config,
        max_loras=options.max_loras,
        max_lora_rank=options.max_lora_rank,
        cached=options.cached_tokens,
        tiers=_tier_hits(options),
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_speculative_tokens=options.num_speculative_tokens,
        acceptance=options.acceptance,
        draft_model=options.draft_model,
        what_if=options.what_if,
        speculative=options.speculative_config,
        draft_share=options.draft_share,
        beam_width=options.beam_width,
        embedding_bits=options.embedding_bits,
        quantization_method=options.quantization_method,
    )


def _output_len(options: PredictOptions) -> int:
    """Output tokens, with the thinking cut off at its budget. Raises BadInput."""
    if options.thinking_len > options.output_len:
        raise BadInput(
            "--thinking-len is a part of the output",
            value=options.thinking_len,
            limit=f"at most --output-len {options.output_len:,}",
        )
    budget = options.thinking_token_budget
    saved = 0 if budget is None else max(0, options.thinking_len - budget)
    return max(1, options.output_len - saved)


def _tier_hits(options: PredictOptions) -> TierHits | None:
    rates = (options.kv_tier_memory_bandwidth, options.kv_tier_file_bandwidth)
    if not (options.kv_tier_memory_tokens or options.kv_tier_file_tokens):
        require_no_rates(rates, "--kv-tier-memory-tokens or --kv-tier-file-tokens")
        return None
    return tier_hits(options.kv_tier_memory_tokens, options.kv_tier_file_tokens, rates)


def predict_file(
    source: str, sources: PredictSources | None = None, *, explain: bool = False
) -> Iterator[dict[str, Any]]:
    """Predict every line of a JSONL file of operating points; `-` reads stdin.

    A line that cannot be predicted yields its error. Raises BadInput if the file cannot be read.
    """
    sources = sources or PredictSources()
    rows, measured = sources.devices(), sources.measured
    points: Iterable[str] = sys.stdin
    if source != "-":
        try:
            points = Path(source).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput("cannot read the points", value=source, fix=str(error)) from None

    def answer(point: OperatingPoint) -> Prediction | dict[str, Any]:
        prediction = predict(point, rows, measured=measured)
        if not explain:
            return prediction
        figures: dict[str, Any] = msgspec.to_builtins(prediction)
        return {**figures, "waterfall": waterfall(point, prediction, rows, measured=measured)}

    return predict_lines(points, answer)


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
