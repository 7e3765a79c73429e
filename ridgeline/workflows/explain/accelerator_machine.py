"""A device of the catalogue in place of this machine, for explanations of hardware not at hand."""

from __future__ import annotations

from ridgeline.hardware.catalogue import Accelerator
from ridgeline.hardware.machine import Machine


def machine_of(device: Accelerator) -> Machine:
    """The record of a machine with the device's memory, bandwidth and dense peaks."""
    peaks = dict(device.peak_flops)
    if "bfloat16" in peaks:
        peaks.setdefault("float16", peaks["bfloat16"])
    return Machine(
        cpu_model=device.name,
        architecture=device.kind,
        isa=(),
        physical_cores=1,
        logical_cores=1,
        usable_cores=1.0,
        memory_bytes=device.memory_bytes,
        memory_available_bytes=device.memory_bytes,
        caches=(),
        read_bandwidth_bytes_s={1: device.bandwidth_bytes_s},
        cache_bandwidth_bytes_s={},
        multiply_flops=peaks,
        gemm_flops={},
        native_dtypes=tuple(peaks),
        gpus=(),
        cpu_share=1.0,
        probed_unix_s=0.0,
        took_s=0.0,
        fingerprint=device.name,
    )
