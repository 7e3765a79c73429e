"""Exports of nsys and ncu, in the layouts that NVIDIA's tools write: read, and judged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

import ridgeline
from ridgeline.cli.commands.measure.diagnose import run_nsight
from ridgeline.cli.main import main
from ridgeline.config.load import DiagnoseOptions
from ridgeline.diagnose.nsight import kind_of, read_profile, sentences
from ridgeline.errors import BadInput
from ridgeline.workflows.diagnose.nsight_export import diagnose_nsight

TRACE = """
Processing [run.sqlite] with [cuda_gpu_trace.py]...
Start (ns),Duration (ns),CorrId,GrdX,Bytes (MB),Device,Ctx,GreenCtx,Strm,Name
0,100,1,8,,H100 (0),1,,7,"void cutlass::gemm<int, float>(Params)"
50,100,2,8,,H100 (0),1,,8,flash_fwd_kernel
400,100,3,8,,H100 (0),1,,7,"void cutlass::gemm<int, float>(Params)"
900,100,4,,1.5,H100 (0),1,,7,[CUDA memcpy DtoH]
"""
SUMS = """Time (%),Total Time (us),Instances,Avg (us),Med (us),Min (us),Max (us),StdDev (us),Name
70.0,"7,000.0",350,20.0,20.0,19,21,0.1,"marlin::Marlin<half>(int4 const*)"
30.0,3000.0,700,4.3,4.3,4,5,0.1,void rms_norm_kernel<float>
"""
_HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def ncu(*rows):
    """(id, kernel, metric, unit, value) in the long layout, under the tool's own talk."""
    lines = ["==PROF== Connected to process 7", _HEAD]
    for number, kernel, metric, unit, value in rows:
        front = f'"{number}","7","p","h","{kernel}","1","7","(1,1,1)","(1,1,1)","0","9.0",'
        lines.append(f'{front}"GPU Speed Of Light Throughput","{metric}","{unit}","{value}"')
    return "\n".join(lines)


def launch(number, kernel, us, memory, compute):
    return (
        (number, kernel, "Duration", "us", us),
        (number, kernel, "DRAM Throughput", "%", memory),
        (number, kernel, "Memory Throughput", "Gbyte/s", "2,900.1"),
        (number, kernel, "Compute (SM) Throughput", "%", compute),
    )


def test_trace_has_idle_share_over_all_streams():
    found = read_profile(TRACE)
    assert found.source == "nsys trace"
    assert found.idle_share == pytest.approx(1 - (150 + 100 + 100) / 1000)
    assert found.median_launch_s == pytest.approx(100e-9)
    first = found.kernels[0]
    assert (first.kind, first.count, first.total_s) == ("linear", 2, pytest.approx(200e-9))
    assert found.by_kind() == pytest.approx({"linear": 0.5, "attention": 0.25, "copy": 0.25})
    lines = sentences(found)
    assert lines[0].startswith("host-overhead-bound: no kernel ran 65% of the time")
    assert "linear kernels take 50%" in lines[1]


def test_idle_share_is_computed_per_device():
    other = TRACE + "0,1000,5,8,,H100 (1),1,,7,gemm\n"
    assert read_profile(other).idle_share == pytest.approx(0.65 / 2)


def test_kernel_sums_have_no_idle_share():
    found = read_profile(SUMS)
    assert found.source == "nsys sums" and found.idle_share is None
    assert [(k.kind, k.count) for k in found.kernels] == [("linear", 350), ("norm", 700)]
    assert found.total_s == pytest.approx(0.01) and found.by_bound() == {}
    assert not any("bound" in sentence for sentence in sentences(found))


def test_ncu_gives_bounds_weighted_by_time():
    rows = (
        *launch(0, "gemv_a", "1,000.0", "90.0", "20.0"),
        *launch(1, "gemv_a", "3000", "70.0", "40.0"),
        *launch(2, "gemm_b", "500", "30.0", "85.0"),
        *launch(3, "tiny", "10", "5.0", "3.0"),
        (4, "broken", "Duration", "us", "n/a"),
    )
    found = read_profile(ncu(*rows))
    kernels = {kernel.name: kernel for kernel in found.kernels}
    assert set(kernels) == {"gemv_a", "gemm_b", "tiny"}
    assert kernels["gemv_a"].memory_share == pytest.approx((0.9 * 1 + 0.7 * 3) / 4)
    assert kernels["gemv_a"].total_s == pytest.approx(4e-3)
    assert {name: k.bound for name, k in kernels.items()} == {
        "gemv_a": "memory",
        "gemm_b": "compute",
        "tiny": "latency",
    }
    assert found.by_bound() == pytest.approx(
        {"memory": 4000 / 4510, "compute": 500 / 4510, "latency": 10 / 4510}
    )
    assert sentences(found)[-1].startswith("decode-bandwidth-bound: 89%")


def test_raw_ncu_metric_names_are_read():
    rows = (
        (0, "k", "gpu__time_duration.sum", "nsecond", "2000"),
        (0, "k", "dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "10"),
        (0, "k", "sm__throughput.avg.pct_of_peak_sustained_elapsed", "%", "80"),
    )
    (kernel,) = read_profile(ncu(*rows)).kernels
    assert (kernel.total_s, kernel.bound) == (pytest.approx(2e-6), "compute")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16", "communication"),
        ("void vllm::paged_attention_v2_kernel", "attention"),
        ("ampere_fp16_s1688gemm_fp16_64x128", "linear"),
        ("vllm::rms_norm_kernel", "norm"),
        ("radixSortKVInPlace", "sampling"),
        ("reshape_and_cache_flash_kernel", "attention"),
        ("vectorized_elementwise_kernel", "elementwise"),
        ("who_knows", "other"),
    ],
)
def test_kind_of_kernel_follows_from_its_name(name, kind):
    assert kind_of(name) == kind


RAW = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"gpu__time_duration.sum","sm__throughput.avg.pct_of_peak_sustained_elapsed"
"","","","%","us","%"
"0","7","gemv","81.5","1,200.5","12.0"
"1","7","tiny","3","2","4"
"""


def test_ncu_with_a_column_per_metric_is_read():
    gemv, tiny = read_profile(RAW).kernels
    assert (gemv.name, gemv.bound, tiny.bound) == ("gemv", "memory", "latency")
    assert gemv.total_s == pytest.approx(1.2005e-3) and gemv.memory_share == pytest.approx(0.815)


def test_decimal_comma_is_recognised():
    """Nsight Compute writes numbers as the system's locale does; no single value tells which."""
    rows = (
        (0, "k", "gpu__time_duration.sum", "ns", "117.344"),
        (0, "k", "dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "12,5"),
        (0, "k", "sm__throughput.avg.pct_of_peak_sustained_elapsed", "%", "65,77"),
    )
    (kernel,) = read_profile(ncu(*rows)).kernels
    assert (kernel.total_s, kernel.bound) == (pytest.approx(117_344e-9), "compute")
    assert kernel.memory_share == pytest.approx(0.125)


def header_of(*sizes: str) -> str:
    """The columns of cuda_gpu_kern_sum, in nanoseconds."""
    times = [f"{name} (ns)" for name in ("Avg", "Med", "Min", "Max", "StdDev")]
    return ",".join(("Time (%)", "Total Time (ns)", "Instances", *times, *sizes, "Name"))


GRIDS = f"""{header_of("GridXYZ", "BlockXYZ")}
50.0,600,2,300,300,300,300,0,   8    1    1,128 1 1,"void gemm<(int)4, float>(float *)"
25.0,300,1,300,300,300,300,0,  16    1    1,128 1 1,"void gemm<(int)4, float>(float *)"
25.0,300,3,100,100,100,100,0,   1    1    1, 32 1 1,rms_norm
"""


def test_launches_of_all_sizes_are_one_kernel():
    """cuda_gpu_kern_gb_sum, and cuda_gpu_kern_sum of some versions, have a row per grid."""
    gemm, norm = read_profile(GRIDS).kernels
    assert (gemm.name, gemm.count) == ("void gemm<(int)4, float>(float *)", 3)
    assert (gemm.total_s, norm.total_s) == (pytest.approx(900e-9), pytest.approx(300e-9))


ALL_REPORTS = f"""
NOTICE: Existing SQLite export found: run.sqlite
        It is assumed file was previously exported from: run.nsys-rep

Processing [run.sqlite] with [nsys/reports/cuda_api_sum.py]...

 ** CUDA API Summary (cuda_api_sum):

Time (%),Total Time (ns),Num Calls,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
100.0,9000,9,1000.0,1000.0,1000,1000,0.0,cudaLaunchKernel

Processing [run.sqlite] with [nsys/reports/cuda_gpu_kern_sum.py]...

 ** CUDA GPU Kernel Summary (cuda_gpu_kern_sum):

{header_of()}
60.0,3000,3,1000.0,1000.0,1000,1000,0.0,"void marlin<half, 4>(int4 const*)"
40.0,2000,1,2000.0,2000.0,2000,2000,0.0,rms_norm

Processing [run.sqlite] with [nsys/reports/cuda_gpu_mem_time_sum.py]...

 ** CUDA GPU MemOps Summary (by Time) (cuda_gpu_mem_time_sum):

Time (%),Total Time (ns),Count,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Operation
100.0,500,1,500.0,500.0,500,500,0.0,[CUDA memcpy Host-to-Device]
"""


def test_kernels_are_found_among_other_reports():
    """`nsys stats --format csv` without a report prints all of them."""
    found = read_profile(ALL_REPORTS)
    assert [(k.name, k.count) for k in found.kernels] == [
        ("void marlin<half, 4>(int4 const*)", 3),
        ("rms_norm", 1),
    ]
    assert found.total_s == pytest.approx(5e-6)


DETAILS = """step 1, Name of run, Duration 3
==PROF== Profiling "void f<int, float>" - 0: 0%....50%....100% - 9 passes
==WARNING== Launch 1, of "void f<int, float>", has no DRAM
"ID","Process ID","Kernel Name","CC","Section Name","Metric Name","Metric Unit","Metric Value",\
"Rule Name","Rule Type","Rule Description","Estimated Speedup Type","Estimated Speedup"
"0","7","void f<int, float>","9.0","GPU Speed Of Light Throughput","Duration","us","1,234.5"
"0","7","void f<int, float>","9.0","GPU Speed Of Light Throughput","DRAM Throughput","%","91.2"
"0","7","void f<int, float>","9.0","SpeedOfLight","","","","SOLBottleneck","OPT","Memory is used
more than compute, see
the section ""Memory Workload Analysis"".","",""
"0","7","void f<int, float>","9.0","GPU Speed Of Light Throughput","Compute (SM) Throughput","%","8"
"0","8","void f<int, float>","9.0","GPU Speed Of Light Throughput","Duration","us","765.5"
"0","8","void f<int, float>","9.0","GPU Speed Of Light Throughput","DRAM Throughput","%","91.2"
"0","8","void f<int, float>","9.0","GPU Speed Of Light Throughput","Compute (SM) Throughput","%","8"
==PROF== Disconnected from process 7
==PROF== Report: a, b
"""


def test_details_of_two_processes_with_rules_and_logs():
    (kernel,) = read_profile(DETAILS).kernels
    assert (kernel.name, kernel.count, kernel.bound) == ("void f<int, float>", 2, "memory")
    assert kernel.total_s == pytest.approx(2e-3)
    assert kernel.memory_share == pytest.approx(0.912)


def test_a_log_line_is_not_the_row_of_units():
    text = RAW.replace('"0","7","gemv"', '==PROF== a,b\n"0","7","gemv"')
    assert [kernel.name for kernel in read_profile(text).kernels] == ["gemv", "tiny"]


@pytest.mark.parametrize("space", ["\u00a0", "\u202f", "'", "\u2019", " "])
def test_thousands_may_be_separated_by_spaces(space: str):
    rows = (
        (0, "k", "gpu__time_duration.sum", "ns", f"1{space}234,5"),
        (0, "k", "dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "12,5"),
    )
    (kernel,) = read_profile(ncu(*rows)).kernels
    assert kernel.total_s == pytest.approx(1234.5e-9)


def test_figures_in_base_units_may_have_an_exponent():
    rows = (
        (0, "k", "gpu__time_duration.sum", "s", "2.5e-05"),
        (0, "k", "sm__throughput.avg.pct_of_peak_sustained_elapsed", "%", "3"),
    )
    found = read_profile(ncu(*rows))
    assert found.kernels[0].total_s == pytest.approx(2.5e-5)
    assert found.kernels[0].bound is None and "no bound is known" in sentences(found)[-1]


@pytest.mark.parametrize(
    ("unit", "seconds"), [("us", 1e-6), ("\u03bcs", 1e-6), ("\u00b5s", 1e-6), ("ms", 1e-3)]
)
def test_units_of_nsys(unit: str, seconds: float):
    text = TRACE.replace("(ns)", f"({unit})")
    assert read_profile(text).kernels[0].total_s == pytest.approx(200 * seconds)


def test_a_log_line_with_a_single_quotation_mark_takes_no_rows_with_it():
    """The reader took the rows after it into one cell, and they were missing without a word."""
    for text, row in ((DETAILS, '"0","8","void f'), (TRACE, "50,100,2"), (GRIDS, "25.0,300,1")):
        whole = read_profile(text)
        for line in ('"interrupted', '"interrupted, or not', '"a" is b'):
            assert row in text
            assert read_profile(text.replace(row, f"{line}\n{row}", 1)) == whole


def test_an_export_that_is_cut_off_in_a_row_is_refused():
    row = '0,100,1,8,,H100 (0),1,,7,"void cutlass::gemm<int, float>(Params)"\n'
    with pytest.raises(BadInput, match="its table is damaged: unexpected end of data"):
        read_profile(TRACE + row[:40])


def test_a_long_line_outside_of_the_table_does_not_matter():
    long = f"loaded,{'x' * 200_000},done\n"
    assert read_profile(long + TRACE) == read_profile(TRACE)


def test_a_table_without_kernels_does_not_hide_the_next_one():
    head = TRACE.strip().splitlines()[1]
    assert read_profile(f"{head}\n\n{SUMS}") == read_profile(SUMS)
    with pytest.raises(BadInput, match=r"\(nsys trace\) contains no kernel"):
        read_profile(f"{head}\n\n{header_of()}\n")


def test_three_decimals_after_a_comma_are_not_thousands():
    """A locale with a decimal comma where every value has three decimals: the share was 501."""
    (kernel,) = read_profile(ncu(*launch(0, "k", "2,345", "50,123", "8,001"))).kernels
    assert kernel.total_s == pytest.approx(2.345e-6)
    assert kernel.memory_share == pytest.approx(0.50123)
    (kernel,) = read_profile(ncu((0, "k", "Duration", "us", "0,345"))).kernels
    assert kernel.total_s == pytest.approx(0.345e-6)
    with pytest.raises(BadInput, match="50123 % is more than a device can reach"):
        read_profile(ncu(*launch(0, "k", "2345", "50123", "8")))


MPI = f"""{header_of("Source")}
100.0,900,1,900.0,900.0,900,900,0.0,coll_send,MPI_Allreduce
"""
SUMMARY = """"Process ID","Kernel Name","Invocations","Metric Name","Metric Unit","Average"
"7","k","3","Duration","us","2"
"""
TABLE = """ Time (%)  Total Time (ns)  Instances  Avg (ns)   Name
 --------  ---------------  ---------  --------   ----
    100.0              900          1     900.0   gemm
"""
NO_TIME = """"ID","Kernel Name","sm__throughput.avg.pct_of_peak_sustained_elapsed"
"","","%"
"0","k","8"
"""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (MPI, "another report, with the columns Time"),
        (SUMMARY, "without --print-summary"),
        (TABLE, "--format csv"),
        (NO_TIME, "no launch has a Duration"),
        (TRACE.replace("(ns)", "(fortnights)"), "the unit of 'Start (fortnights)'"),
        (TRACE.replace("\n0,100,", "\n0,nan,"), "'nan' is not a number"),
        (TRACE.replace("\n0,100,", "\n0,-1,"), "'-1' is not a number"),
        (SUMS.replace("3000.0,700", "3000.0,many"), "'many' is not a number"),
        (f'{header_of()}\n1,1,1,1,1,1,1,1,"{"k" * 200_000}"\n', "its table is damaged"),
        (f"{header_of()}\n0.0,0,1,0,0,0,0,0,k\n", "add up to nothing"),
    ],
)
def test_the_error_says_what_is_wrong(text: str, why: str):
    with pytest.raises(BadInput, match=re.escape(why)):
        read_profile(text)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_files_of_a_windows_shell_are_read(tmp_path, encoding: str):
    path = tmp_path / "trace.csv"
    path.write_bytes(TRACE.lstrip().partition("\n")[2].replace("\n", "\r\n").encode(encoding))
    assert diagnose_nsight(path).profile.total_s == pytest.approx(400e-9)


@pytest.mark.parametrize(
    ("name", "fix"), [("run.nsys-rep", "nsys stats --report"), ("run.ncu-rep", "ncu --import")]
)
def test_a_binary_report_is_refused_with_the_command_that_exports_it(tmp_path, name, fix):
    path = tmp_path / name
    path.write_bytes(b"NVR\0\x08\xff\0\0")
    with pytest.raises(BadInput, match=fix):
        diagnose_nsight(path)


def test_names_with_brackets_are_printed_whole(tmp_path):
    """PyTorch's kernels contain `[lambda() (instance 1)]`, which rich takes for markup."""
    name = "f<[lambda() (instance 1)]>[/x]"
    path = tmp_path / "sums.csv"
    path.write_text(f'{header_of()}\n100.0,9,1,9,9,9,9,0,"{name}"\n')
    console = Console(record=True, width=160)
    run_nsight(path, DiagnoseOptions(), console)
    assert name in console.export_text()


def test_every_kernel_of_ridgeline_has_a_kind():
    folder = Path(ridgeline.__file__).parent / "engine" / "kernels" / "triton"
    sources = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    jitted = set(re.findall(r"@triton.jit\ndef (\w+)", sources))
    launched = jitted & set(re.findall(r"^ +(\w+)\[.+\]\(", sources, re.M))
    assert {"_attend", "_multiply", "_rope_store"} <= launched
    assert {name for name in launched if kind_of(name) == "other"} == set()


API_TRACE = """Start (ns),Duration (ns),Name,Result,CorrID,Pid,Tid,T-Pri,Thread Name
0,900,cudaLaunchKernel,0,1,7,7,20,main
"""
API_SUMS = """Time (%),Total Time (ns),Num Calls,Avg (ns),Name
100.0,900,1,900.0,cudaLaunchKernel
"""
RANGES = """Name,Start (ns),Duration (ns),Projected Start (ns),Projected Duration (ns),CorrId
step,10,100,20,80,2
"""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n1,2\n",
        "Start (ns),Duration (ns),CorrId,Strm,Name\n",
        "{}",
        API_TRACE,
        API_SUMS,
        RANGES,
    ],
)
def test_other_files_are_rejected(text):
    with pytest.raises(BadInput, match="cannot read this as an export of Nsight"):
        read_profile(text)


def test_the_command(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    console = Console(record=True, width=160)
    run_nsight(path, DiagnoseOptions(), console)
    text = console.export_text()
    assert "GPU idle 65%" in text and "flash_fwd_kernel" in text and "host-overhead-bound" in text
    capsys.readouterr()
    assert main(["diagnose", "--nsight", str(path), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["kinds"]["linear"] == pytest.approx(0.5) and output["findings"]
    assert output["kernels"][0]["bound"] is None and output["bounds"] == {}
    assert main(["diagnose", "--nsight", str(path), "--url", "http://h"]) == 2
    assert main(["diagnose", "demo", "--nsight", str(path)]) == 2
    assert main(["diagnose", "--nsight", str(tmp_path / "none.csv")]) == 2
