"""A packed embedding table on a replica: what it takes of the memory, and of a step if it is tied.

A step looks up one row per token, which is not counted. The LM head reads the whole table where it
shares it; one with other bits is a second table, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec.structs import replace

from ridgeline.errors import CannotRun
from ridgeline.modelspec.cost.serving_formats import table_bytes_in
from ridgeline.plan.step_time.replica import Replica

TABLES: Mapping[int, str] = MappingProxyType({8: "int8-row", 4: "int4-g128"})
"""Formats of a packed table by its bits."""


def with_packed_table(machine: Replica, bits: int) -> Replica:
    """The replica with its embedding table in `bits`, and a tied LM head with it.

    Raises CannotRun on a calibrated machine, whose times are those of a head as stored.
    """
    if machine.calibration is not None:
        raise CannotRun(
            "a packed table cannot be predicted by a calibration: it timed the head as stored",
            value=f"{bits} bits",
            fix="leave out --calibration or --embedding-bits",
        )
    spec, layout = machine.spec, machine.layout
    whole = table_bytes_in(spec, machine.head_dtype) / layout.tp
    packed = table_bytes_in(spec, TABLES[bits]) / layout.tp
    return replace(
        machine,
        resident_bytes=machine.resident_bytes + (packed - whole) / layout.pp,
        head_bytes=packed if spec.tied_embeddings else machine.head_bytes,
    )
