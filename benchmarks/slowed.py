"""The calibration of a machine in another mood."""

from __future__ import annotations

import msgspec

from ridgeline.plan.calibration import Attending, Calibration, Overheads

IN_MEMORY = 1.5  # a working set read at less than this much of memory's rate comes from there


def slowed(calibration: Calibration, reads: float, ops: float) -> Calibration:
    """The calibration of a machine whose memory and arithmetic are so much slower."""
    scale = msgspec.structs.replace
    rates, largest = calibration.bandwidth_bytes_s, max(calibration.bandwidth_bytes_s, key=float)
    linears = {
        name: scale(
            linear,
            weight_s=tuple(each * ops for each in linear.weight_s),
            row_s=linear.row_s * ops,
            layer_s=linear.layer_s * ops,
            output_s=linear.output_s * ops,
        )
        for name, linear in calibration.linears.items()
    }
    return scale(
        calibration,
        linears=linears,
        bandwidth_bytes_s={
            size: rate / (reads if rate < IN_MEMORY * rates[largest] else ops)
            for size, rate in rates.items()
        },
        attention=Attending(*(each * ops for each in _fields(calibration.attention))),
        overheads=Overheads(*(each * ops for each in _fields(calibration.overheads))),
    )


def _fields(record: msgspec.Struct) -> list[float]:
    return [float(value) for value in msgspec.structs.astuple(record)]
