"""The event log: lossless, written atomically, with clear errors for unreadable files."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.config.load import BenchReport
from ridgeline.errors import BadInput, CannotRun
from ridgeline.measure.monitors.machine_monitor import MachineReport
from ridgeline.measure.monitors.server_metrics import ServerReport
from ridgeline.measure.results import event_log
from ridgeline.measure.results.event_log import (
    RunContext,
    context_from_results,
    find_log,
    read_log,
    read_run,
    write_run,
)
from ridgeline.measure.results.readers import read_result
from ridgeline.records import EngineInfo, RequestTrace, RunTrace, StepStat
from ridgeline.report import files
from ridgeline.report.files import write_file
from ridgeline.workflows.bench.bench import check_outputs

INFO = EngineInfo(
    model="tiny",
    settings={"batching": "static", "max_num_seqs": 4, "dtype": None},
    derivations={"max_num_seqs": "asked"},
    max_model_len=64,
    num_blocks=4,
    block_size=16,
    weight_bytes=1,
    kv_bytes_per_token=1,
    device="cpu",
    compute_dtype="float32",
)


@pytest.fixture
def run(request_trace, run_trace, step_stat):
    requests = [
        request_trace(id="a", text="line\u2028break\n", token_s=(0.1 + 0.2, 1 / 3)),
        request_trace(id="b", error="timeout: late", finish_reason=None, token_s=()),
    ]
    return run_trace(
        requests,
        steps=[step_stat([(3, 0), (1, 7)])],
        info=INFO,
        client_cpu_share=0.25,
        send_lag_p99_s=0.001,
    )


@pytest.mark.parametrize("name", ["run.jsonl", "run.parquet"])
def test_a_run_reads_back_from_either_form(tmp_path, run, name):
    path = tmp_path / name
    write_run(run, path)
    assert read_run(path) == run
    assert read_result(path).tool == "ridgeline"
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_log_has_one_line_each(tmp_path, run):
    path = tmp_path / "run.jsonl"
    write_run(run, path)
    assert len(path.read_bytes().split(b"\n")) == 1 + 2 + 1 + 1


number = st.floats(allow_nan=False, allow_infinity=False)
count = st.integers(0, 2**40)
requests = st.builds(
    RequestTrace,
    id=st.text(),
    kind=st.text(),
    scheduled_s=number,
    sent_s=number,
    started_s=st.none() | number,
    token_s=st.lists(number, max_size=3).map(tuple),
    token_counts=st.lists(count, max_size=3).map(tuple),
    finished_s=st.none() | number,
    prompt_tokens=count,
    cached_tokens=count,
    output_tokens=count,
    requested_tokens=st.none() | count,
    finish_reason=st.none() | st.text(),
    error=st.none() | st.text(),
    text=st.text(),
)


@pytest.mark.slow
@given(st.lists(requests, max_size=3), number, st.none() | number)
def test_any_record_reads_back(tmp_path_factory, made, duration_s, share):
    run = RunTrace(
        target="t",
        workload="w",
        arrivals="burst",
        seed=3,
        started_unix_s=1.0,
        duration_s=duration_s,
        requests=tuple(made),
        client_cpu_share=share,
    )
    for name in ("any.jsonl", "any.parquet"):
        path = tmp_path_factory.getbasetemp() / name
        write_run(run, path)
        assert read_run(path) == run


def test_every_field_of_a_run_is_kept():
    names = set(event_log.LogHeader.__struct_fields__) | {"requests", "steps"}
    assert set(RunTrace.__struct_fields__) <= names


def test_full_disk_keeps_the_earlier_file(tmp_path, run, monkeypatch):
    path = tmp_path / "run.jsonl"
    path.write_text("before")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(BadInput, match="No space left on device"):
        write_run(run, path)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_unwritable_path_is_an_error(run):
    with pytest.raises(BadInput, match="cannot write"):
        write_run(run, Path("/nowhere/at/all/run.jsonl"))


def test_failed_writer_leaves_no_file(tmp_path):
    def parts():
        yield b"half"
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        write_file(tmp_path / "out", parts())
    assert list(tmp_path.iterdir()) == []


def test_incomplete_log_is_rejected(tmp_path, run):
    path = tmp_path / "run.jsonl"
    write_run(run, path)
    lines = path.read_bytes().split(b"\n")
    for kept, words in (
        (lines[:2], "truncated"),
        (lines[1:], "no header line"),
        ([lines[0], b"{half"], r"run\.jsonl:2"),
        ([lines[0].replace(b'"version":2', b'"version":9')], "unsupported version"),
        ([], "no header line"),
    ):
        path.write_bytes(b"\n".join(kept))
        with pytest.raises(BadInput, match=words):
            read_run(path)
    with pytest.raises(BadInput, match="no such result file"):
        read_run(tmp_path / "missing.jsonl")


def test_steps_are_kept(tmp_path, run_trace, step_stat):
    step: StepStat = step_stat([(1, 2)], num_preempted=1, hit_tokens=3, queried_tokens=4)
    write_run(run_trace([], steps=[step]), tmp_path / "s.jsonl")
    assert read_run(tmp_path / "s.jsonl").steps == (step,)


def test_parquet_columns_are_named_after_the_records(tmp_path, run):
    """Anybody's Parquet reader sees one row per request and per step, and nulls elsewhere."""
    from pyarrow import parquet

    write_run(run, tmp_path / "run.parquet")
    columns = parquet.read_table(tmp_path / "run.parquet").to_pydict()
    assert set(columns) == {
        "type",
        *RequestTrace.__struct_fields__,
        *StepStat.__struct_fields__,
    }
    assert columns["type"] == ["request", "request", "step"]
    assert columns["token_s"] == [[0.1 + 0.2, 1 / 3], [], None]
    assert columns["shapes"] == [None, None, [[3, 0], [1, 7]]]


def test_other_parquet_files_are_rejected(tmp_path, run):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "run.parquet"
    parquet.write_table(pyarrow.table({"a": [1]}), path)
    with pytest.raises(BadInput, match="not an event log"):
        read_run(path)
    write_run(run, path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BadInput, match="not a Parquet file"):
        read_run(path)


def test_missing_parquet_library_is_found_before_measuring(tmp_path, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "run.parquet"
    with pytest.raises(CannotRun, match=r"ridgeline\[parquet\]"):
        check_outputs(BenchReport(log=path))
    with pytest.raises(CannotRun, match="pyarrow"):
        write_run(run, path)
    assert not path.exists()
    check_outputs(BenchReport(log=tmp_path / "run.jsonl"))


SERVER_REPORT = ServerReport(
    server="vllm", num_readings=3, means={"running": 2.5}, p95={}, counts={"preemptions": 1.0},
    mean_s={"queue_s": 0.1},
)  # fmt: skip
CONTEXT = RunContext(
    server=SERVER_REPORT, machine=MachineReport(notes=("elsewhere",)), shared_prompt_share=0.4
)


@pytest.mark.parametrize("name", ["run.jsonl", "run.parquet"])
def test_server_report_is_stored_with_the_run(tmp_path, run, name):
    write_run(run, tmp_path / name, CONTEXT)
    assert read_log(tmp_path / name) == (run, CONTEXT)
    write_run(run, tmp_path / name)
    assert read_log(tmp_path / name) == (run, None)


def test_the_log_is_found_in_its_folder(tmp_path, run):
    with pytest.raises(BadInput, match="no event log in this folder"):
        find_log(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    write_run(run, tmp_path / "events.jsonl")
    assert find_log(tmp_path) == tmp_path / "events.jsonl" == find_log(tmp_path / "events.jsonl")
    write_run(run, tmp_path / "again.parquet")
    with pytest.raises(BadInput, match="several event logs"):
        find_log(tmp_path)


def test_older_log_takes_its_context_from_the_result_file(tmp_path):
    assert context_from_results(tmp_path) is None
    (tmp_path / "other.json").write_text('{"ridgeline": 3}')
    data = msgspec.json.encode(
        {"ridgeline": {"server": SERVER_REPORT, "machine": {"notes": ["x"]}}}
    )
    (tmp_path / "result.json").write_bytes(data)
    assert context_from_results(tmp_path) == RunContext(
        server=SERVER_REPORT, machine=MachineReport(notes=("x",))
    )
    (tmp_path / "twin.json").write_bytes(data)
    assert context_from_results(tmp_path) is None
