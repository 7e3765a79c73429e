"""Exports of nsys and ncu, in the layouts that NVIDIA's tools write: read, and judged."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from ridgeline.cli.commands.measure.diagnose import run_nsight
from ridgeline.cli.main import main
from ridgeline.config.load import DiagnoseOptions
from ridgeline.diagnose.nsight import kind_of, read_profile, sentences
from ridgeline.errors import BadInput

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
    assert main(["diagnose", "--nsight", str(path), "--url", "http://h"]) == 2
    assert main(["diagnose", "demo", "--nsight", str(path)]) == 2
    assert main(["diagnose", "--nsight", str(tmp_path / "none.csv")]) == 2
