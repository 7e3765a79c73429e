"""Published efficiencies: the share of a device's peaks that inference engines reach."""

from __future__ import annotations

import math
import tomllib
from functools import lru_cache
from importlib.resources import files
from typing import Any

import msgspec

from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import Accelerator

_MEDIAN_TO_SIGMA = 0.6745  # the median of |x| of a standard normal
COVERAGE = 0.8
_Z = 1.2816  # a standard normal lies within ±1.2816 with probability 0.8


class Efficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of the dense peaks that a step reaches, and its overheads in seconds.

    `step_s` per step, `layer_s` per layer of it, `run_s` per sequence in it, `collective_s` per
    collective operation. `tpot_error`, `ttft_error`: median relative error to expect.
    """

    bandwidth: float
    compute: float
    step_s: float
    layer_s: float
    run_s: float
    collective_s: float
    tpot_error: float
    ttft_error: float
    source: str
    as_of: str

    def __post_init__(self) -> None:
        shares = (self.bandwidth, self.compute)
        if not all(0 < share <= 1 for share in shares):
            raise BadInput(
                "an efficiency must be a share of the dense peak", value=shares, limit="(0, 1]"
            )
        if not (self.source.strip() and self.as_of.strip()):
            raise BadInput("an efficiency row needs a source and a date", value=self.source)


def efficiency_of(device: Accelerator) -> Efficiency:
    """The published efficiency of a device, or the default; `compute` is capped by the share that
    plain matrix products reach on the device."""
    document = _document()
    row = dict(document["default"])
    for specific in document["device"]:
        if device.name in specific["names"]:
            row |= {key: value for key, value in specific.items() if key != "names"}
            row["source"] = f"{document['default']['source']}; {specific['source']}"
    if device.achievable is not None:
        row["compute"] = min(row["compute"], device.achievable)
    return msgspec.convert(row, Efficiency)


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    text = (
        files("ridgeline.plan.calibration").joinpath("efficiency.toml").read_text(encoding="utf-8")
    )
    return tomllib.loads(text)


def interval(value: float, median_error: float) -> tuple[float, float]:
    """The 80 % interval around a prediction, for log-normal errors with this median."""
    spread = math.exp(_Z * math.log1p(median_error) / _MEDIAN_TO_SIGMA)
    return value / spread, value * spread
