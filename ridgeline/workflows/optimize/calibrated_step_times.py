"""Step times of a calibration for whoever simulates this machine's engine: `optimize` does.

A calibration knows formats that were never run here (that is what the optimiser wants to be told
about), and the engine's measured steps know the machine's mood today and what else runs beside the
engine. So the calibrated seconds are scaled by measured over calibrated, the median of the steps
that were learnt: of the same weights where there are any, of the latest ones otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median

from ridgeline.config.settings import Settings
from ridgeline.errors import CannotRun, UserError
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.calibration.calibration import Calibration
from ridgeline.plan.step_time.replica import Replica, replica
from ridgeline.records import StepStat

Shapes = Sequence[tuple[int, int]]
Seconds = Callable[[Shapes, int], float]
MIN_STEPS = 8  # under which a factor says nothing
_FORMATS = {"bf16": "bfloat16"}


class Prices:
    """Seconds of a configuration's steps, where the calibration has its formats."""

    def __init__(self, calibration: Calibration) -> None:
        self._device = calibration.accelerator()
        self._machine = lru_cache(maxsize=None)(self._make)
        self._factors: dict[tuple[str, str | None], float] = {}
        self._latest = 1.0

    def learn(self, settings: Settings, steps: Sequence[StepStat]) -> None:
        """How much slower than calibrated these steps were."""
        machine = self._machine(settings.model, settings.quantization, settings.kv_cache_dtype)
        counted = [step for step in steps if step.shapes]
        if machine is None or len(counted) < MIN_STEPS:
            return
        self._latest = median(
            (step.run_s + step.plan_s) / machine.price(step.shapes, step.num_sampled).seconds
            for step in counted
        )
        self._factors[settings.model, settings.quantization] = self._latest

    def of(self, settings: Settings) -> Seconds | None:
        """None for weights that were not calibrated, or a shape that is not known."""
        machine = self._machine(settings.model, settings.quantization, settings.kv_cache_dtype)
        if machine is None:
            return None
        factor = self._factors.get((settings.model, settings.quantization), self._latest)
        return lambda shapes, num_sampled: factor * machine.price(shapes, num_sampled).seconds

    def _make(self, model: str, quantization: str | None, kv_dtype: str) -> Replica | None:
        try:
            return replica(
                load_planning_spec(model),
                self._device,
                weight_dtype=None
                if quantization is None
                else _FORMATS.get(quantization, quantization),
                kv_dtype=None if kv_dtype == "auto" else kv_dtype,
            )
        except UserError:
            return None


def require_known(prices: Prices, settings: Settings) -> None:
    """CannotRun where not even the model to begin with is priced: the flag would have no effect."""
    if prices.of(settings) is None:
        raise CannotRun(
            "the calibration does not cover this model's shape or weight format",
            value=f"{settings.model} {settings.quantization or 'dense'}",
            fix=f"ridgeline calibrate --engine {settings.model}",
        )
