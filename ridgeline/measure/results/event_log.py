"""A RunTrace on disk as JSONL: a header, one line per request, one per engine step.

The header contains the number of lines, so that a truncated file is detected. Floats are written
so that they read back exactly. Files are replaced atomically. A file named .parquet holds the same
data as a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput
from ridgeline.measure.monitors.machine_monitor import MachineReport
from ridgeline.measure.monitors.server_metrics import ServerReport
from ridgeline.measure.results import event_log_parquet
from ridgeline.measure.results.result_file import missing_file
from ridgeline.records import EngineInfo, MachineLoad, RequestTrace, RunTrace, StepStat
from ridgeline.report.files import write_file

VERSION = 2


class RunContext(msgspec.Struct, frozen=True, kw_only=True):
    """Context of a run: the server's metrics and its machine during the run.

    `shared_prompt_share`: share of prompt tokens that a prefix cache can reuse (prompts are not
    stored).
    """

    server: ServerReport | None = None
    machine: MachineReport = MachineReport()
    shared_prompt_share: float = 0.0


class LogHeader(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    version: int
    num_requests: int
    num_steps: int
    target: str
    workload: str
    arrivals: str
    seed: int
    started_unix_s: float
    duration_s: float
    info: EngineInfo | None
    client_cpu_share: float | None
    send_lag_p99_s: float | None
    context: RunContext | None = None
    machine_load: MachineLoad | None = None


class RequestLine(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    request: RequestTrace


class StepLine(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    step: StepStat


LogLine = LogHeader | RequestLine | StepLine

_SHARED = [name for name in LogHeader.__struct_fields__ if name in RunTrace.__struct_fields__]
_DECODER: msgspec.json.Decoder[LogLine] = msgspec.json.Decoder(LogLine)


def write_run(run: RunTrace, path: Path, context: RunContext | None = None) -> None:
    """Write the run.

    Raises BadInput if the disk refuses, CannotRun for .parquet without pyarrow.
    """
    if event_log_parquet.is_parquet(path):
        header = msgspec.json.encode(_header(run, context))
        write_file(path, [event_log_parquet.encode(run, header, path)])
        return
    write_file(path, (msgspec.json.encode(line) + b"\n" for line in _lines(run, context)))


def read_run(path: Path) -> RunTrace:
    """The run of an event log. Raises BadInput."""
    return read_log(path)[0]


def read_log(path: Path) -> tuple[RunTrace, RunContext | None]:
    """The run and its context; None if the log has none. Raises BadInput."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise missing_file(path) from None
    except OSError as error:
        raise BadInput("cannot read the event log", value=str(path), fix=str(error)) from None
    header, requests, steps = _table(path, data) if _is_table(data) else _rows(path, data)
    if not isinstance(header, LogHeader):
        raise BadInput("the file is not an event log: it has no header line", value=str(path))
    if header.version != VERSION:
        raise BadInput(
            "the event log has an unsupported version", value=header.version, limit=VERSION
        )
    if (len(requests), len(steps)) != (header.num_requests, header.num_steps):
        raise BadInput(
            "the event log is truncated",
            value=f"{len(requests)} requests, {len(steps)} steps",
            limit=f"{header.num_requests} requests, {header.num_steps} steps",
        )
    shared = {name: getattr(header, name) for name in _SHARED}
    return RunTrace(requests=requests, steps=steps, **shared), header.context


def is_event_log(data: bytes) -> bool:
    """Whether a file that starts with `data` may be an event log."""
    return _is_table(data) or data.startswith(b'{"type":"run"')


def find_log(path: Path) -> Path:
    """The event log, or the only one in a folder. Raises BadInput if there is not exactly one."""
    if not path.is_dir():
        return path
    logs = [file for file in sorted(path.iterdir()) if file.is_file() and _starts_as_log(file)]
    if len(logs) != 1:
        raise BadInput(
            "no event log in this folder" if not logs else "several event logs in this folder",
            value=str(path) if not logs else ", ".join(file.name for file in logs),
            fix="write one with bench --log" if not logs else "name one of the files",
        )
    return logs[0]


class _SavedContext(msgspec.Struct):
    """The context in a result of `bench --json`."""

    server: ServerReport | None = None
    machine: MachineReport = MachineReport()


class _SavedResult(msgspec.Struct):
    ridgeline: _SavedContext


def context_from_results(folder: Path) -> RunContext | None:
    """The context in the only result of `bench --json` in a folder; None if there is not one."""
    saved = []
    for path in sorted(folder.glob("*.json")):
        try:
            saved.append(msgspec.json.decode(path.read_bytes(), type=_SavedResult).ridgeline)
        except (OSError, *DECODE_ERRORS):
            continue
    return RunContext(server=saved[0].server, machine=saved[0].machine) if len(saved) == 1 else None


def _starts_as_log(path: Path) -> bool:
    with path.open("rb") as file:
        return is_event_log(file.read(64))


LogContent = tuple[LogLine | None, tuple[RequestTrace, ...], tuple[StepStat, ...]]


def _is_table(data: bytes) -> bool:
    return data.startswith(event_log_parquet.MAGIC)


def _table(path: Path, data: bytes) -> LogContent:
    header, requests, steps = event_log_parquet.decode(data, path)
    return _decode(path, 1, header), requests, steps


def _rows(path: Path, data: bytes) -> LogContent:
    rows = [_decode(path, i, line) for i, line in enumerate(data.split(b"\n"), 1) if line]
    requests = tuple(row.request for row in rows if isinstance(row, RequestLine))
    steps = tuple(row.step for row in rows if isinstance(row, StepLine))
    return rows[0] if rows else None, requests, steps


def _header(run: RunTrace, context: RunContext | None) -> LogHeader:
    return LogHeader(
        version=VERSION,
        context=context,
        num_requests=len(run.requests),
        num_steps=len(run.steps),
        **{name: getattr(run, name) for name in _SHARED},
    )


def _lines(run: RunTrace, context: RunContext | None) -> Iterable[LogLine]:
    yield _header(run, context)
    yield from (RequestLine(request=request) for request in run.requests)
    yield from (StepLine(step=step) for step in run.steps)


def _decode(path: Path, number: int, line: bytes) -> LogLine:
    try:
        return _DECODER.decode(line)
    except DECODE_ERRORS as error:
        raise BadInput(f"{path}:{number}: not a line of an event log ({error})") from None
