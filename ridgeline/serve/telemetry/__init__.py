"""Traces and metrics of requests for other systems: OpenTelemetry, CloudWatch.

Everything is written when a request ends, from counts that exist anyway: nothing is done per token.
"""

from __future__ import annotations

import ridgeline
from ridgeline.serve.telemetry.base import NoTelemetry, SeveralTelemetries, Telemetry


def open_telemetry(otlp_endpoint: str | None, emf_file: str | None, *, service: str) -> Telemetry:
    """The exporters that are asked for. Raises BadInput where one cannot be opened."""
    exporters: list[Telemetry] = []
    if otlp_endpoint is not None:
        from ridgeline.serve.telemetry.otel import OtelTelemetry  # an optional extra

        exporters.append(OtelTelemetry(otlp_endpoint, service, ridgeline.__version__))
    if emf_file is not None:
        from ridgeline.serve.telemetry.emf import EmfTelemetry

        exporters.append(EmfTelemetry(emf_file, service))
    if not exporters:
        return NoTelemetry()
    if len(exporters) == 1:
        return exporters[0]
    return SeveralTelemetries(exporters)
