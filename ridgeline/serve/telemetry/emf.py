"""CloudWatch metrics as lines of its embedded metric format, which its agent reads from logs.

One line per model and minute. Its dimensions are the service and the model: none that a user could
fill, each value of which would be a metric with a price.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TextIO

import msgspec

from ridgeline.errors import BadInput
from ridgeline.serve.telemetry.base import NoRouteSpan, RequestRecord, RouteSpan

NAMESPACE = "Ridgeline"
_INTERVAL_S = 60.0
_MAX_VALUES = 100  # of one metric in one line
_UNITS = {
    "Requests": "Count",
    "Errors": "Count",
    "InputTokens": "Count",
    "CachedTokens": "Count",
    "OutputTokens": "Count",
    "Duration": "Milliseconds",
    "TimeToFirstToken": "Milliseconds",
    "TimePerOutputToken": "Milliseconds",
}


class _Minute(msgspec.Struct):
    """What the requests of a model came to."""

    counts: dict[str, int] = msgspec.field(
        default_factory=lambda: {name: 0 for name, unit in _UNITS.items() if unit == "Count"}
    )
    values: dict[str, list[float]] = msgspec.field(
        default_factory=lambda: {name: [] for name, unit in _UNITS.items() if unit != "Count"}
    )

    def add(self, record: RequestRecord) -> None:
        counts, is_ended = self.counts, not record.is_migrated
        counts["OutputTokens"] += record.generated_tokens
        if is_ended:  # the others are counted by the server that continues them
            counts["Requests"] += 1
            counts["Errors"] += record.error not in ("", "cancelled")
            counts["InputTokens"] += record.input_tokens
            counts["CachedTokens"] += record.cached_tokens
        for name, seconds in (
            ("Duration", record.ended_s if is_ended else None),
            ("TimeToFirstToken", record.ttft_s),
            ("TimePerOutputToken", record.tpot_s),
        ):
            if seconds is not None:
                self.values[name].append(round(seconds * 1000, 3))

    def fields(self) -> dict[str, int | list[float]]:
        """Values of the line: evenly chosen ones where there are more than a line holds."""
        chosen = {name: _thin(values) for name, values in self.values.items() if values}
        return {**self.counts, **chosen}


class EmfTelemetry:
    """Appends to the file `path`, "-" for standard output."""

    def __init__(self, path: str, service: str, *, interval_s: float = _INTERVAL_S) -> None:
        self._service, self._lock = service, threading.Lock()
        self._minutes: dict[str, _Minute] = {}
        try:
            self._file: TextIO = sys.stdout if path == "-" else Path(path).open("a")  # noqa: SIM115
        except OSError as error:
            raise BadInput(f"--emf-file cannot be written: {error.strerror}", value=path) from None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(interval_s,), daemon=True)
        self._thread.start()

    def end_request(self, record: RequestRecord) -> None:
        """Count one request."""
        with self._lock:
            self._minutes.setdefault(record.model, _Minute()).add(record)

    def begin_route(self, path: str, traceparent: str, scheme: str) -> RouteSpan:
        """Nothing: requests are counted by the servers."""
        return NoRouteSpan()

    def close(self) -> None:
        """Write what is left."""
        self._stopped.set()
        self._thread.join()
        self._write()
        if self._file is not sys.stdout:
            self._file.close()

    def _run(self, interval_s: float) -> None:
        while not self._stopped.wait(interval_s):
            self._write()

    def _write(self) -> None:
        with self._lock:
            minutes, self._minutes = self._minutes, {}
        for model, minute in minutes.items():
            print(emf_line(self._service, model, minute.fields()), file=self._file, flush=True)


def emf_line(service: str, model: str, fields: dict[str, int | list[float]]) -> str:
    """One line of the embedded metric format."""
    metrics = [{"Name": name, "Unit": _UNITS[name]} for name in fields]
    directive = {
        "Namespace": NAMESPACE,
        "Dimensions": [["Service", "Model"]],
        "Metrics": metrics,
    }
    line = {
        "_aws": {"Timestamp": round(time.time() * 1000), "CloudWatchMetrics": [directive]},
        "Service": service,
        "Model": model,
        **fields,
    }
    return msgspec.json.encode(line).decode()


def _thin(values: list[float]) -> list[float]:
    if len(values) <= _MAX_VALUES:
        return values
    ordered = sorted(values)
    return [ordered[i * (len(ordered) - 1) // (_MAX_VALUES - 1)] for i in range(_MAX_VALUES)]
