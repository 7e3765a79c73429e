"""Read exports of NVIDIA's profilers: where a GPU's time goes, and what bounds its kernels.

    nsys profile -o run --trace=cuda --cuda-graph-trace=node COMMAND      then load it with `bench`
    nsys stats --report cuda_gpu_trace --format csv run.nsys-rep > trace.csv     every launch
    nsys stats --report cuda_gpu_kern_sum --format csv run.nsys-rep > sum.csv    sums by kernel
    ncu --csv --section SpeedOfLight --launch-count 200 COMMAND > ncu.csv        their roofs

The kind of export is recognised by its header (`nsight_tables.py`). Without
`--cuda-graph-trace=node` a CUDA graph is a single event without kernels, so that the trace looks
idle while graphs run. Nsight Compute replays every kernel in isolation, so that only the bound of
each kernel is taken from it, not the schedule. `memory` and `compute` are shares of the device's
own peaks; a kernel below SATURATED in both is bound by latency (too small, or launched alone).

The readers follow NVIDIA's documentation and exports of nsys 2023 to 2026 and ncu 2024 to 2026
found in public repositories; they have not been tried on exports of our own.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from ridgeline.diagnose.nsight_tables import (
    DURATION,
    SHARES,
    UNITS,
    Row,
    Source,
    find_tables,
    number_of,
    seconds_of,
    unreadable,
)

Bound = Literal["memory", "compute", "latency"]
SATURATED = 0.6  # NVIDIA's own rule of thumb for "bound by"
IDLE = 0.3

KINDS: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter"),
    ("attention", r"flash|fmha|attention|attn|attend|paged|mla|^combine$"),
    ("linear", r"gemm|gemv|matmul|cutlass|xmma|wgmma|marlin|cublas|nvjet|mul_mat"),
    ("linear", r"^_multiply|^_widen$|^_scale_rows$"),  # of Ridgeline
    ("norm", r"norm"),
    ("sampling", r"softmax|top_?k|argmax|largest|multinomial|sampl|sort|scan"),
    ("copy", r"memcpy|memset|copy|cat_?array|reshape_and_cache"),
    ("elementwise", r"elementwise|silu|gelu|swiglu|rotary|rope|embedding|index|fill|add|mul"),
)
"""Kind of kernel by a pattern in its name; the first match wins."""


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
    profiles = (_READERS[source](rows) for source, rows in find_tables(text))
    empty: list[Source] = []
    for profile in profiles:
        if profile.kernels:
            break
        empty.append(profile.source)
    else:
        raise unreadable(f"the table of this export ({empty[0]}) contains no kernel")
    if profile.total_s <= 0:
        raise unreadable("the times of its kernels add up to nothing")
    return profile


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
    if profile.source == "ncu" and not profile.by_bound():
        lines.append(
            "No kernel has both shares of its peaks (DRAM Throughput, Compute (SM) Throughput), so "
            "that no bound is known: record with ncu --section SpeedOfLight."
        )
    bounds = sorted(profile.by_bound().items(), key=lambda item: -item[1])
    lines += [texts[bound].format(share=f"{share:.0%}") for bound, share in bounds[:1]]
    return tuple(lines)


def kind_of(name: str) -> str:
    """The kind of a kernel, by its name."""
    lower = name.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, lower)), "other")


def _trace(rows: Sequence[Row]) -> GpuProfile:
    spans = [
        (row.get("Device", ""), seconds_of(row, "Start"), seconds_of(row, "Duration"), row["Name"])
        for row in rows
        if row["Name"]
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


def _sums(rows: Sequence[Row]) -> GpuProfile:
    """One kernel per name: reports with launch sizes have a row per kernel, grid and block."""
    sums: dict[str, tuple[int, float]] = {}
    for row in rows:
        if row["Name"]:
            count, total_s = sums.get(row["Name"], (0, 0.0))
            more = int(number_of(row["Instances"]))
            sums[row["Name"]] = count + more, total_s + seconds_of(row, "Total Time")
    kernels = (
        Kernel(name=name, kind=kind_of(name), count=count, total_s=total_s)
        for name, (count, total_s) in sums.items()
        if count > 0
    )
    return GpuProfile(source="nsys sums", kernels=_longest_first(kernels))


def _ncu(rows: Sequence[Row]) -> GpuProfile:
    """`rows`: one per launch and metric."""
    launches: dict[tuple[str, ...], dict[str, float]] = {}
    values = [_SPACES.sub("", row["Metric Value"]) for row in rows]
    comma = any(
        _DECIMAL_COMMA.match(value) or (row["Metric Unit"] == "%" and _THREE_DECIMALS.match(value))
        for row, value in zip(rows, values, strict=True)
    )
    for row, value in zip(rows, values, strict=True):
        if row["Kernel Name"]:
            launch = (row.get("Process ID", ""), row["ID"], row["Kernel Name"])
            launches.setdefault(launch, {}).update(_metric(row, value, comma))
    by_name: dict[str, list[dict[str, float]]] = {}
    for (*_, name), metrics in launches.items():
        if "duration" in metrics:
            by_name.setdefault(name, []).append(metrics)
    if launches and not by_name:
        raise unreadable(
            f"no launch has a {' or '.join(DURATION)}; record with ncu --section SpeedOfLight"
        )
    kernels = (_ncu_kernel(name, rows_of_kernel) for name, rows_of_kernel in by_name.items())
    return GpuProfile(source="ncu", kernels=_longest_first(kernels))


_SPACES = re.compile(r"[\s\u00a0\u202f'\u2019]")
"""Separators between thousands of some locales, besides point and comma."""

_DECIMAL_COMMA = re.compile(r"[\d.]*\.\d{3}(\.\d{3})+$|[\d.]*\d,(\d{1,2}|\d{4,})$|0,\d+$")
"""Matches numbers that can only have points between thousands and a decimal comma. One such value
decides for the whole file (Nsight Compute follows the locale of the system)."""

_THREE_DECIMALS = re.compile(r"\d{1,3},\d{3}$")
"""Matches shares in percent that a comma between thousands would put at 1,000 % or more."""

MAX_SHARE = 2.0
"""Of a peak: measured shares exceed 1 by little, so that a larger one has been misread."""

_FIGURE = re.compile(r"[\d.,]+([eE][+-]?\d+)?$")
"""A number of Nsight Compute, and not "n/a"."""


def _metric(row: Row, value: str, comma: bool) -> dict[str, float]:
    """The metric of a row if it is one of those that are used; {} also for "n/a"."""
    metric, unit = row["Metric Name"], row["Metric Unit"]
    if not _FIGURE.match(value):
        return {}
    if comma:
        value = value.replace(".", "").replace(",", ".")
    if metric in DURATION and unit in UNITS:
        return {"duration": number_of(value) * UNITS[unit]}
    shares = {
        name: number_of(value) / 100
        for name, names in SHARES.items()
        if metric in names and unit == "%"
    }
    if any(share > MAX_SHARE for share in shares.values()):
        raise unreadable(f"a {metric} of {row['Metric Value']} % is more than a device can reach")
    return shares


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


_READERS = {"nsys trace": _trace, "nsys sums": _sums, "ncu": _ncu}
