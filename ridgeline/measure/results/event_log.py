"""A RunTrace on disk: JSONL, one header line, one line per request, one per engine step.

The header says how many lines follow, so that a truncated file is noticed. Floats are written so
that they read back exactly. A file is written whole beside its place and then renamed: a full
disk or an interruption leaves what was there before, and nothing half-written. A file named
.parquet holds the same as a table (log_parquet.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from ridgeline.errors import BadInput
from ridgeline.measure.monitors.machine_monitor import MachineReport
from ridgeline.measure.monitors.server_metrics import ServerReport
from ridgeline.measure.results import event_log_parquet
from ridgeline.records import EngineInfo, RequestTrace, RunTrace, StepStat
from ridgeline.report.files import write_file

VERSION = 1


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's own records do not tell: the server's words and its machine during the run, and
    how much of the load repeats the head of an earlier prompt (prompts are not kept).
    """

    server: ServerReport | None = None
    machine: MachineReport = MachineReport()
    shared_prompt_share: float = 0.0


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
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
    beside: Beside | None = None


class RequestLine(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    request: RequestTrace


class StepLine(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    step: StepStat


Line = Header | RequestLine | StepLine

_SHARED = [name for name in Header.__struct_fields__ if name in RunTrace.__struct_fields__]
_DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def write_run(run: RunTrace, path: Path, beside: Beside | None = None) -> None:
    """Write the whole run, or nothing; BadInput names the file where the disk refuses, CannotRun
    what a .parquet lacks here.
    """
    if event_log_parquet.wanted(path):
        header = msgspec.json.encode(_header(run, beside))
        write_file(path, [event_log_parquet.encode(run, header, path)])
        return
    write_file(path, (msgspec.json.encode(line) + b"\n" for line in _lines(run, beside)))


def read_run(path: Path) -> RunTrace:
    """The run that `write_run` wrote, field for field."""
    return read_log(path)[0]


def read_log(path: Path) -> tuple[RunTrace, Beside | None]:
    """The run, and what was seen beside it; None where the log was written without."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput("cannot read the event log", value=str(path), fix=str(error)) from None
    header, requests, steps = _table(path, data) if _is_table(data) else _rows(path, data)
    if not isinstance(header, Header):
        raise BadInput("not an event log: no header line", value=str(path))
    if header.version != VERSION:
        raise BadInput("event log of another version", value=header.version, limit=VERSION)
    if (len(requests), len(steps)) != (header.num_requests, header.num_steps):
        raise BadInput(
            "the event log is truncated",
            value=f"{len(requests)} requests, {len(steps)} steps",
            limit=f"{header.num_requests} requests, {header.num_steps} steps",
        )
    shared = {name: getattr(header, name) for name in _SHARED}
    return RunTrace(requests=requests, steps=steps, **shared), header.beside


def is_event_log(data: bytes) -> bool:
    """Whether a file that begins so may be one of `write_run`'s."""
    return _is_table(data) or data.startswith(b'{"type":"run"')


def find_log(path: Path) -> Path:
    """The event log itself, or the only one in a run's folder. BadInput where it is not alone."""
    if not path.is_dir():
        return path
    found = [each for each in sorted(path.iterdir()) if each.is_file() and _begins_as_log(each)]
    if len(found) != 1:
        raise BadInput(
            "no event log in this folder" if not found else "several event logs in this folder",
            value=str(path) if not found else ", ".join(each.name for each in found),
            fix="write one with bench --log" if not found else "name the file",
        )
    return found[0]


class _Told(msgspec.Struct):
    """What `bench --json` keeps of it."""

    server: ServerReport | None = None
    machine: MachineReport = MachineReport()


class _ResultFile(msgspec.Struct):
    ridgeline: _Told


def beside_in_results(folder: Path) -> Beside | None:
    """What the one result file of `bench --json` in a folder tells of server and machine."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=_ResultFile).ridgeline)
        except (OSError, msgspec.DecodeError):
            continue
    return Beside(server=found[0].server, machine=found[0].machine) if len(found) == 1 else None


def _begins_as_log(path: Path) -> bool:
    with path.open("rb") as file:
        return is_event_log(file.read(64))


Read = tuple[Line | None, tuple[RequestTrace, ...], tuple[StepStat, ...]]


def _is_table(data: bytes) -> bool:
    return data.startswith(event_log_parquet.MAGIC)


def _table(path: Path, data: bytes) -> Read:
    header, requests, steps = event_log_parquet.decode(data, path)
    return _decode(path, 1, header), requests, steps


def _rows(path: Path, data: bytes) -> Read:
    rows = [_decode(path, i, line) for i, line in enumerate(data.split(b"\n"), 1) if line]
    requests = tuple(row.request for row in rows if isinstance(row, RequestLine))
    steps = tuple(row.step for row in rows if isinstance(row, StepLine))
    return rows[0] if rows else None, requests, steps


def _header(run: RunTrace, beside: Beside | None) -> Header:
    return Header(
        version=VERSION,
        beside=beside,
        num_requests=len(run.requests),
        num_steps=len(run.steps),
        **{name: getattr(run, name) for name in _SHARED},
    )


def _lines(run: RunTrace, beside: Beside | None) -> Iterable[Line]:
    yield _header(run, beside)
    yield from (RequestLine(request=request) for request in run.requests)
    yield from (StepLine(step=step) for step in run.steps)


def _decode(path: Path, number: int, line: bytes) -> Line:
    try:
        return _DECODER.decode(line)
    except msgspec.MsgspecError as error:
        raise BadInput(f"{path}:{number}: not a line of an event log ({error})") from None
