"""Read exports of NVIDIA's profilers: where a GPU's time goes, and what bounds its kernels.

    nsys profile -o run --trace=cuda --cuda-graph-trace=node COMMAND      then load it with `bench`
    nsys stats --report cuda_gpu_trace --format csv run.nsys-rep > trace.csv     every launch
    nsys stats --report cuda_gpu_kern_sum --format csv run.nsys-rep > sum.csv    sums by kernel
    ncu --csv --section SpeedOfLight --launch-count 200 COMMAND > ncu.csv        their roofs

The kind of export is recognised by its header; the tools' log lines before it are skipped. Reports
with similar headers (API calls, NVTX ranges) are rejected, because their times are not GPU times.
Without `--cuda-graph-trace=node` a CUDA graph is a single event without kernels, so that the trace
looks idle while graphs run. Nsight Compute writes one row per metric or (`--page raw`) one column
per metric with a row of units, and uses a decimal comma under some locales; all of these are read.
It replays every kernel in isolation, so that only the bound of each kernel is taken from it, not
the schedule. `memory` and `compute` are shares of the device's own peaks; a kernel below SATURATED
in both is bound by latency (too small, or launched alone).

The readers follow NVIDIA's documentation and exports of nsys 2023 to 2025 and ncu 2024 and 2025
found in public repositories; they have not been tried on exports of our own.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from ridgeline.errors import BadInput

Source = Literal["nsys trace", "nsys sums", "ncu"]
Bound = Literal["memory", "compute", "latency"]
SATURATED = 0.6  # NVIDIA's own rule of thumb for "bound by"
IDLE = 0.3

KINDS: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter"),
    ("attention", r"flash|fmha|attention|attn|paged|mla"),
    ("linear", r"gemm|gemv|matmul|cutlass|xmma|wgmma|marlin|cublas|nvjet|mul_mat"),
    ("norm", r"norm"),
    ("sampling", r"softmax|top_?k|argmax|multinomial|sampl|sort|scan"),
    ("copy", r"memcpy|memset|copy|cat_?array|reshape_and_cache"),
    ("elementwise", r"elementwise|silu|gelu|swiglu|rotary|rope|embedding|index|fill|add|mul"),
)
"""Kind of kernel by a pattern in its name; the first match wins."""

_PERCENT = {
    "memory": (
        "DRAM Throughput",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "compute": ("Compute (SM) Throughput", "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
}
_DURATION = ("Duration", "gpu__time_duration.sum")
_UNITS = {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3,
          "s": 1.0, "second": 1.0}  # fmt: skip


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """All launches of one kernel. The shares of peak come from ncu and are weighted by time."""

    name: str
    kind: str
    count: int
    total_s: float
    memory_share: float | None = None
    compute_share: float | None = None

    @property
    def bound(self) -> Bound | None:
        if self.memory_share is None or self.compute_share is None:
            return None
        if max(self.memory_share, self.compute_share) < SATURATED:
            return "latency"
        return "memory" if self.memory_share >= self.compute_share else "compute"


class GpuProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels by total time, longest first.

    `idle_share`: share of the traced time without a kernel.
    """

    source: Source
    kernels: tuple[Kernel, ...]
    idle_share: float | None = None
    median_launch_s: float | None = None

    @property
    def total_s(self) -> float:
        return sum(kernel.total_s for kernel in self.kernels)

    def by_kind(self) -> dict[str, float]:
        """Share of the kernel time per kind, largest first."""
        sums: dict[str, float] = {}
        for kernel in self.kernels:
            sums[kernel.kind] = sums.get(kernel.kind, 0.0) + kernel.total_s
        ordered = sorted(sums.items(), key=lambda item: -item[1])
        return {kind: seconds / self.total_s for kind, seconds in ordered}

    def by_bound(self) -> dict[Bound, float]:
        """Share of the kernel time per bound; {} if bounds were not measured."""
        sums: dict[Bound, float] = {}
        for kernel in self.kernels:
            if kernel.bound is not None:
                sums[kernel.bound] = sums.get(kernel.bound, 0.0) + kernel.total_s
        total = sum(sums.values())
        return {bound: seconds / total for bound, seconds in sums.items()}


def read_profile(text: str) -> GpuProfile:
    """Read an export. Raises BadInput if it is none of the three kinds, or contains no kernel."""
    rows = _table(text)
    columns = set(rows[0]) if rows else set()
    if "Kernel Name" in columns and ("Metric Name" in columns or not columns.isdisjoint(_DURATION)):
        profile = _ncu(rows if "Metric Name" in columns else _long(rows))
    elif _times(columns, "Start") and "Strm" in columns:
        profile = _trace(rows)
    elif _times(columns, "Total Time") and {"Instances", "Name"} <= columns:
        profile = _sums(rows)
    else:
        raise _unreadable("the file has none of their headers")
    if not profile.kernels:
        raise _unreadable("the file contains no kernel")
    return profile


def _times(columns: Iterable[str], title: str) -> bool:
    """Whether there is a column of times with this title, such as `Start (ns)`."""
    return any(name.startswith(f"{title} (") for name in columns)


def sentences(profile: GpuProfile) -> tuple[str, ...]:
    """The findings, with the verdicts that `ridgeline diagnose` uses."""
    lines = []
    if profile.idle_share is not None and profile.idle_share >= IDLE:
        median = 1e6 * (profile.median_launch_s or 0.0)
        lines.append(
            f"host-overhead-bound: no kernel ran {profile.idle_share:.0%} of the time (median "
            f"kernel {median:.1f} us), so the time goes into launches and the host, not the GPU. "
            "Use CUDA graphs, fewer and larger kernels, or asynchronous scheduling."
        )
    kinds = profile.by_kind()
    first = next(iter(kinds))
    lines.append(f"{first} kernels take {kinds[first]:.0%} of the kernel time.")
    texts = {
        "memory": "decode-bandwidth-bound: {share} of the kernel time is at the memory limit; "
        "fewer bytes (quantised weights or KV cache) shorten it.",
        "compute": "prefill-compute-bound: {share} of the kernel time is at the compute limit; "
        "lower precision or less work shortens it.",
        "latency": "{share} of the kernel time is in kernels that reach neither limit because they "
        "are too small for the device; a larger batch or fused kernels help.",
    }
    bounds = sorted(profile.by_bound().items(), key=lambda item: -item[1])
    lines += [texts[bound].format(share=f"{share:.0%}") for bound, share in bounds[:1]]
    return tuple(lines)


def kind_of(name: str) -> str:
    """The kind of a kernel, by its name."""
    lower = name.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, lower)), "other")


def _unreadable(why: str) -> BadInput:
    return BadInput(
        "cannot read this as an export of Nsight Systems or Nsight Compute",
        limit="CSV of cuda_gpu_trace, cuda_gpu_kern_sum, or ncu --csv",
        fix=why,
    )


def _table(text: str) -> list[dict[str, str]]:
    """The rows below the header; log lines of the tool above it are skipped."""
    lines = text.split("\n")
    marks = ("Start (", "Total Time (", "Metric Name", *_DURATION)
    for i, line in enumerate(lines):
        if "Name" in line and "," in line and any(mark in line for mark in marks):
            return list(csv.DictReader(lines[i:]))
    return []


def _seconds(row: Mapping[str, str], name: str) -> float:
    """The value of a column whose header contains its unit: `Duration (ns)`."""
    for column, value in row.items():
        title, _, unit = (column or "").partition(" (")
        if title == name and value:
            return _number(value) * _UNITS[unit.rstrip(")")]
    raise _unreadable(f"a row has no {name!r}")


def _number(value: str) -> float:
    try:
        return float(value.replace(",", ""))
    except ValueError:
        raise _unreadable(f"{value!r} is not a number") from None


def _trace(rows: Sequence[Mapping[str, str]]) -> GpuProfile:
    spans = [
        (row.get("Device") or "", _seconds(row, "Start"), _seconds(row, "Duration"), row["Name"])
        for row in rows
        if row.get("Name")
    ]
    times: dict[str, list[float]] = {}
    for _, _, duration_s, name in spans:
        times.setdefault(name, []).append(duration_s)
    kernels = (_kernel(name, durations) for name, durations in times.items())
    devices = {device for device, *_ in spans}
    idle = [_idle([(s, s + d) for on, s, d, _ in spans if on == device]) for device in devices]
    return GpuProfile(
        source="nsys trace",
        kernels=_longest_first(kernels),
        idle_share=statistics.fmean(idle) if idle else None,
        median_launch_s=statistics.median(d for _, _, d, _ in spans) if spans else None,
    )


def _idle(spans: list[tuple[float, float]]) -> float:
    """Share of the time between the first start and the last end that no span covers."""
    covered, until_s = 0.0, min(begin_s for begin_s, _ in spans)
    first_s = until_s
    for begin_s, end_s in sorted(spans):
        covered += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return 1 - covered / (until_s - first_s) if until_s > first_s else 0.0


def _sums(rows: Sequence[Mapping[str, str]]) -> GpuProfile:
    kernels = (
        Kernel(
            name=row["Name"],
            kind=kind_of(row["Name"]),
            count=int(_number(row["Instances"])),
            total_s=_seconds(row, "Total Time"),
        )
        for row in rows
        if row.get("Name")
    )
    return GpuProfile(source="nsys sums", kernels=_longest_first(kernels))


def _long(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Convert a table with one column per metric and a row of units to one row per metric."""
    units, *launches = rows
    metrics = {*_DURATION, *(name for names in _PERCENT.values() for name in names)}
    return [
        {
            "ID": row.get("ID") or "",
            "Kernel Name": row.get("Kernel Name") or "",
            "Metric Name": name,
            "Metric Unit": units.get(name) or "",
            "Metric Value": row.get(name) or "",
        }
        for row in launches
        for name in row
        if name in metrics
    ]


def _ncu(rows: Sequence[Mapping[str, str]]) -> GpuProfile:
    launches: dict[tuple[str, str], dict[str, float]] = {}
    comma = any(_DECIMAL_COMMA.match(row.get("Metric Value") or "") for row in rows)
    for row in rows:
        if row.get("Kernel Name"):
            metrics = launches.setdefault((row.get("ID") or "", row["Kernel Name"]), {})
            metrics.update(_metric(row, comma))
    by_name: dict[str, list[dict[str, float]]] = {}
    for (_, name), metrics in launches.items():
        if "duration" in metrics:
            by_name.setdefault(name, []).append(metrics)
    kernels = (_ncu_kernel(name, rows_of_kernel) for name, rows_of_kernel in by_name.items())
    return GpuProfile(source="ncu", kernels=_longest_first(kernels))


_DECIMAL_COMMA = re.compile(r"[\d.]*\.\d{3}(\.\d{3})+$|[\d.]*\d,(\d{1,2}|\d{4,})$")
"""Matches numbers that can only have points between thousands and a decimal comma. One such value
decides for the whole file (Nsight Compute follows the locale of the system)."""


def _metric(row: Mapping[str, str], comma: bool) -> dict[str, float]:
    """The metric of a row if it is one of those that are used; {} also for "n/a"."""
    metric, unit = row["Metric Name"], row.get("Metric Unit") or ""
    value = row.get("Metric Value") or ""
    if not re.match(r"[\d.,]+$", value):
        return {}
    if comma:
        value = value.replace(".", "").replace(",", ".")
    if metric in _DURATION and unit in _UNITS:
        return {"duration": _number(value) * _UNITS[unit]}
    return {
        name: _number(value) / 100
        for name, names in _PERCENT.items()
        if metric in names and unit == "%"
    }


def _ncu_kernel(name: str, launches: Sequence[Mapping[str, float]]) -> Kernel:
    total_s = sum(launch["duration"] for launch in launches)

    def share(name: str) -> float | None:
        if total_s <= 0 or not all(name in launch for launch in launches):
            return None
        return sum(launch[name] * launch["duration"] for launch in launches) / total_s

    return Kernel(
        name=name,
        kind=kind_of(name),
        count=len(launches),
        total_s=total_s,
        memory_share=share("memory"),
        compute_share=share("compute"),
    )


def _kernel(name: str, times: Sequence[float]) -> Kernel:
    return Kernel(name=name, kind=kind_of(name), count=len(times), total_s=sum(times))


def _longest_first(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    return tuple(sorted(kernels, key=lambda kernel: -kernel.total_s))
