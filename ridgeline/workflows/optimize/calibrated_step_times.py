"""Step times from a calibration of this machine, for the simulator of `optimize`.

A calibration covers weight formats that were never run in this search; the measured steps show how
fast the machine is today and what else runs on it. So the calibrated times are scaled by measured
over calibrated, as the median over the measured steps: of the same weights if there are any, else
of the latest ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median

from ridgeline.config.settings import Settings
from ridgeline.errors import CannotRun, UserError
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.calibration.calibration import Calibration
from ridgeline.plan.step_time.replica import Replica, build_replica
from ridgeline.records import StepStat

Shapes = Sequence[tuple[int, int]]
StepSeconds = Callable[[Shapes, int], float]
"""(shapes, num_sampled) → seconds of a step."""
MIN_STEPS = 8  # for a factor
_CATALOGUE_DTYPES = {"bf16": "bfloat16"}


class CalibratedStepTimes:
    """Seconds of a configuration's steps, for the weight formats that were calibrated."""

    def __init__(self, calibration: Calibration) -> None:
        self._device = calibration.accelerator()
        self._replica = lru_cache(maxsize=None)(self._make_replica)
        self._factors: dict[tuple[str, str | None], float] = {}
        self._latest_factor = 1.0

    def learn(self, settings: Settings, steps: Sequence[StepStat]) -> None:
        """Update the factor of these weights from measured steps."""
        replica = self._replica(settings.model, settings.quantization, settings.kv_cache_dtype)
        counted = [step for step in steps if step.shapes]
        if replica is None or len(counted) < MIN_STEPS:
            return
        self._latest_factor = median(
            (step.run_s + step.plan_s) / replica.price(step.shapes, step.num_sampled).seconds
            for step in counted
        )
        self._factors[settings.model, settings.quantization] = self._latest_factor

    def of(self, settings: Settings) -> StepSeconds | None:
        """Step times of a configuration; None if its weights or its model are not covered."""
        replica = self._replica(settings.model, settings.quantization, settings.kv_cache_dtype)
        if replica is None:
            return None
        factor = self._factors.get((settings.model, settings.quantization), self._latest_factor)
        return lambda shapes, num_sampled: factor * replica.price(shapes, num_sampled).seconds

    def _make_replica(self, model: str, quantization: str | None, kv_dtype: str) -> Replica | None:
        weight_dtype = None
        if quantization is not None:
            weight_dtype = _CATALOGUE_DTYPES.get(quantization, quantization)
        try:
            return build_replica(
                load_planning_spec(model),
                self._device,
                weight_dtype=weight_dtype,
                kv_dtype=None if kv_dtype == "auto" else kv_dtype,
            )
        except UserError:
            return None


def require_calibrated(step_times: CalibratedStepTimes, settings: Settings) -> None:
    """CannotRun if not even the model at the start is covered: the calibration would be unused."""
    if step_times.of(settings) is None:
        raise CannotRun(
            "the calibration does not cover this model's architecture or weight format",
            value=f"{settings.model} {settings.quantization or 'dense'}",
            fix=f"ridgeline calibrate --engine {settings.model}",
        )
