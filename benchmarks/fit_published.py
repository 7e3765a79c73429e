"""Fits `efficiency.toml` to published operating points, and says how wrong `predict` is on them.

    python benchmarks/fit_published.py POINTS.csv            errors of the present table
    python benchmarks/fit_published.py POINTS.csv --fit      fit on four fifths, print the table

POINTS.csv has the columns of the silicon data of ai-dynamo/aiconfigurator (Apache-2.0). Points are
divided by a hash of their operating point, so that repeated measurements of one point stay on one
side; "kept" are those that a fit does not see. Each operating point counts once, however often it
was measured. The fit minimises a robust loss of log(predicted / measured) of TPOT.

Two conventions of the data: tp_size is recorded as tp · ep for some layouts of 8 or 4 devices
(tp_size 64 with 8 x 8 experts); and pools of disaggregated points mostly lack their number of
workers, and whether they speculate, so that equal points differ by up to a factor of two.
"""

from __future__ import annotations

import argparse
import collections
import csv
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ridgeline.errors import UserError
from ridgeline.hardware.catalogue import find_accelerator, load_catalogue
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.parameters import count_layers
from ridgeline.modelspec.cost.serving_formats import parse_weight_dtype
from ridgeline.plan.calibration.published_efficiency import Efficiency, backends, efficiency_of
from ridgeline.plan.step_time.parallel_layout import layout_from
from ridgeline.plan.step_time.predict import (
    OperatingPoint,
    Pool,
    decode_step_s,
    predict,
    time_point,
)
from ridgeline.plan.step_time.replica import Replica, build_replica, with_measured_operators

MODELS = {
    "DeepSeek-R1": "deepseek-v3", "DeepSeek-V3": "deepseek-v3", "Llama-3.1-70B": "llama-3.1-70b",
    "Llama-3.1-8B-Instruct": "llama-3.1-8b", "Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen3-235B-A22B-FP8": "qwen3-235b-a22b", "Qwen3-32B": "qwen3-32b",
    "Qwen3-32B-NVFP4": "qwen3-32b", "gpt-oss-120b": "gpt-oss-120b",
}  # fmt: skip
DEVICES = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "b200_sxm": "b200"}
FORMATS = {"": "bfloat16", "fp8": "fp8", "fp8_block": "fp8-block", "nvfp4": "nvfp4"}
STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Row:
    """One measured point. `kept`: not used by the fit; `weight`: 1 / repetitions."""

    point: OperatingPoint
    group: tuple[str, ...]
    tpot_s: float
    ttft_s: float
    kept: bool
    weight: float


def number(row: Mapping[str, str], name: str, default: int = 1) -> int:
    return int(row[name] or default) or default


def pool(row: Mapping[str, str], side: str) -> Pool:
    return Pool(
        workers=number(row, f"{side}_num_workers"),
        tp=number(row, f"{side}_tp_size"),
        attention_dp=number(row, f"{side}_attention_dp_size"),
        moe_tp=number(row, f"{side}_moe_tp_size"),
        moe_ep=number(row, f"{side}_moe_ep_size"),
    )


def operating_point(row: Mapping[str, str]) -> OperatingPoint:
    model = MODELS[row["model_path"].split("/")[1]]
    found = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    batch = int(found[1]) if found else number(row, "batch_size", 0)
    batch = batch or number(row, "decode_batch_size") * number(row, "decode_num_workers")
    tp, moe_tp, moe_ep = (number(row, f"{name}_size") for name in ("tp", "moe_tp", "moe_ep"))
    if moe_tp > 1 and moe_ep > 1 and tp == moe_tp * moe_ep:
        tp = moe_tp
        moe_tp = 1 if moe_ep == tp else moe_tp
    weights = "mxfp4" if model == "gpt-oss-120b" else FORMATS[row["moe_quant_mode"]]
    common: dict[str, Any] = {
        "model": model, "device": DEVICES[row["system"]], "isl": int(row["isl"]),
        "osl": int(row["osl"]), "batch": batch, "weight_dtype": weights, "backend": row["backend"],
    }  # fmt: skip
    if row["mode"] == "disagg":
        return OperatingPoint(**common, prefill=pool(row, "prefill"), decode=pool(row, "decode"))
    dp = number(row, "attention_dp_size")
    return OperatingPoint(**common, tp=tp, attention_dp=dp, moe_tp=moe_tp, ep=moe_ep)


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        raw = list(csv.DictReader(file))
    points = [operating_point(row) for row in raw]
    repeats = collections.Counter(points)
    return [
        Row(
            point=point,
            group=(point.model, point.device, str(point.backend), row["mode"], row["precision"]),
            tpot_s=float(row["silicon_tpot_ms"]) / 1000,
            ttft_s=float(row["silicon_ttft_ms"]) / 1000,
            kept=is_kept(point),
            weight=1 / repeats[point],
        )
        for row, point in zip(raw, points, strict=True)
    ]


SPLIT_FIELDS = (
    *("model", "device", "isl", "osl", "batch", "tp", "pp", "ep", "attention_dp", "moe_tp"),
    *("backend", "prefill", "decode", "weight_dtype", "kv_dtype", "cached"),
    *("max_num_batched_tokens", "num_speculative_tokens", "acceptance", "draft_model"),
)
"""The fields whose text is hashed: further fields of `OperatingPoint` must not move a point."""


def is_kept(point: OperatingPoint) -> bool:
    """Whether the fit does not see the point: one in five, by a hash of the operating point."""
    fields = ", ".join(f"{name}={getattr(point, name)!r}" for name in SPLIT_FIELDS)
    digest = hashlib.sha256(f"OperatingPoint({fields})".encode()).hexdigest()
    return int(digest, 16) % 5 == 0


def errors(rows: Sequence[Row]) -> None:
    """Print the errors of the present table, over all points and by group."""
    tpot, ttft, refused = {}, {}, collections.Counter[str]()
    inside: dict[str, list[bool]] = {"tpot_ms": [], "ttft_ms": []}
    for index, row in enumerate(rows):
        try:
            found = predict(row.point, roomy())
        except UserError as error:
            refused[str(error)[:110]] += 1
            continue
        if row.kept:
            measured = {"tpot_ms": row.tpot_s * 1000, "ttft_ms": row.ttft_s * 1000}
            for name, held in inside.items():
                low, high = found.interval[name]
                held.append(low <= measured[name] <= high)
        tpot[index] = found.tpot_ms / 1000 / row.tpot_s - 1
        ttft[index] = found.ttft_ms / 1000 / row.ttft_s - 1
    print(f"{len(tpot)} of {len(rows)} points answered")
    for name, held in inside.items():
        print(f"80 % interval of {name} covers {np.mean(held):.0%} of the kept points")
    for reason, count in refused.most_common(8):
        print(f"  refused {count}: {reason}")
    sets = {
        "all": lambda row: True,
        "kept": lambda row: row.kept,
        "kept, aggregated": lambda row: row.kept and row.point.decode is None,
        "kept, disaggregated": lambda row: row.kept and row.point.decode is not None,
    }
    for name in sorted({row.group for row in rows}):
        sets[" ".join(name)] = lambda row, name=name: row.group == name
    for name, chosen in sets.items():
        for what, found_errors in (("TPOT", tpot), ("TTFT", ttft)):
            picked = [(e, rows[i].weight) for i, e in found_errors.items() if chosen(rows[i])]
            if picked:
                print(f"{what} {name:48s} {summary(picked)}")


def summary(picked: Sequence[tuple[float, float]]) -> str:
    error, weight = (np.array(values) for values in zip(*picked, strict=True))
    return (
        f"n {len(picked):4d}  median {quantile(abs(error), weight, 0.5):6.1%}  "
        f"90 % {quantile(abs(error), weight, 0.9):6.1%}  "
        f"bias {quantile(error, weight, 0.5):+6.1%}"
    )


def quantile(values: NDArray[Any], weights: NDArray[Any], share: float) -> float:
    order = values.argsort()
    total = weights[order].cumsum()
    return float(values[order][np.searchsorted(total, share * total[-1])])


def quantile_of(picked: Sequence[tuple[float, float]], share: float) -> float:
    """The quantile of (value, weight) pairs."""
    values, weights = (np.array(column) for column in zip(*picked, strict=True))
    return quantile(values, weights, share)


def roomy() -> Any:
    """The catalogue with enough memory for every point: what fits is not in question here."""
    rows = load_catalogue()
    return {name: replace(row, memory_bytes=row.memory_bytes * 100) for name, row in rows.items()}


# ---- the fit: the same sums as Replica, as arrays over all points --------------------------------


def machine_of(
    point: OperatingPoint, efficiency: Efficiency | None = None, *, measured: bool = False
) -> Replica:
    place = point.decode or Pool(
        tp=point.tp, attention_dp=point.attention_dp, moe_tp=point.moe_tp, moe_ep=point.ep
    )
    spec = load_planning_spec(point.model)
    machine = build_replica(
        spec,
        find_accelerator(point.device),
        layout_from(spec, place.tp, 1, place.moe_ep, place.attention_dp, place.moe_tp),
        weight_dtype=parse_weight_dtype(str(point.weight_dtype)),
        backend=point.backend,
        efficiency=efficiency,
    )
    return with_measured_operators(machine, point.backend) if measured else machine


ROOFLINE = Efficiency(
    bandwidth=1.0,
    compute=1.0,
    expert_bandwidth=1.0,
    expert_compute=1.0,
    kv_bandwidth=1.0,
    latent_compute=1.0,
    prompt_compute=1.0,
    link=1.0,
    step_s=0.0,
    layer_s=0.0,
    run_s=0.0,
    collective_s=0.0,
    tpot_error=0.5,
    ttft_error=0.5,
    source="data sheets",
    as_of="2026-11",
)
"""Every part at its peak, and no overhead: the roofline without a fit."""


def roofline_times(point: OperatingPoint) -> tuple[float, float]:
    """(TTFT, TPOT) in seconds by the untuned roofline."""
    machine = machine_of(point, ROOFLINE)
    if point.decode is None:
        at = time_point(machine, point)
        return at.ttft_s, at.tpot_s
    batch = math.ceil(point.batch / point.decode.workers)
    decode_s = decode_step_s(machine, replace(point, batch=batch))
    assert point.prefill is not None
    first = machine_of(replace(point, decode=point.prefill), ROOFLINE)
    return time_point(first, replace(point, batch=1, osl=1)).ttft_s, decode_s


def step_parts(machine: Replica, groups: Sequence[tuple[int, int, int]], sampled: int) -> list[Any]:
    """Seconds at the peaks of each part of a step, and the counts that overheads multiply."""
    rates, eff, tp = machine.rates, machine.efficiency, machine.layout.tp
    assert rates is not None
    tokens = sum(count * new for count, new, _ in groups)
    routed = tokens * machine.layout.num_attention
    work = machine.cost.attention_of_groups(groups)
    copies = min(tp, machine.num_kv_heads)
    prompt = work.prompt_read_bytes + work.written_bytes if work.prompt_flops else 0.0
    bytes_s, peak = machine.device.bandwidth_bytes_s, rates.head_flops_s / eff.compute
    expert = sum(
        nbytes * group.expected_experts(routed)
        for group, nbytes in zip(machine.cost.experts, machine.expert_bytes, strict=True)
    )
    layers = count_layers(machine.spec)
    link = (machine.device.link_bytes_s or 1.0) * eff.link
    return [
        machine.shared_bytes / bytes_s,
        (machine.linear_flops - machine.expert_flops) * tokens / rates.dense_flops_s * eff.compute,
        expert / bytes_s,
        machine.expert_flops * tokens / rates.expert_flops_s * eff.expert_compute,
        machine.head_bytes / bytes_s,
        machine.head_flops * sampled / peak,
        (work.kv_bytes - prompt) / copies / bytes_s,
        work.decode_flops / tp / peak,
        prompt / copies / bytes_s,
        work.prompt_flops / tp / peak,
        len(machine.spec.layers),
        sum(n for layer, n in layers.items() if layer.mlp.num_experts),
        sum(n for layer, n in layers.items() if layer.attention.latent is not None),
        sum(count for count, _, _ in groups),
        machine.wires.fixed_s / eff.collective_s,
        machine.wires.per_token_s * tokens * link / (machine.device.link_bytes_s or 1.0),
    ]


@dataclass(frozen=True)
class LoopSteps:
    """The steps of a closed loop of `batch` requests on one worker.

    `decode` and `mixed`: (sequences, new tokens, context) of the groups of a step without and with
    a chunk of a prompt. `mixed_share`: the share of a token's steps that are mixed.
    """

    batch: int
    decode: tuple[tuple[int, int, int], ...]
    mixed: tuple[tuple[int, int, int], ...]
    mixed_share: float


def loop_steps(point: OperatingPoint, machine: Replica) -> LoopSteps:
    workers = point.decode.workers if point.decode else 1
    batch = max(1, math.ceil(point.batch / workers / machine.layout.num_attention))
    middle, room = point.isl + point.osl // 2, max(1, STEP_TOKENS - batch + 1)
    num_chunks = math.ceil(point.isl / room)
    new = math.ceil(point.isl / num_chunks)
    steps = max(point.osl - 1 + num_chunks, batch * num_chunks * new / room)
    return LoopSteps(
        batch=batch,
        decode=((batch, 1, middle),),
        mixed=((batch - 1, 1, middle), (1, new, (point.isl - new) // 2)),
        mixed_share=0.0 if point.decode else batch * num_chunks / steps * (batch - 1) / batch,
    )


def features(rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    decode, mixed, chunks, formats = [], [], [], []
    for row in rows:
        point, machine = row.point, machine_of(row.point)
        steps = loop_steps(point, machine)
        decode.append(step_parts(machine, steps.decode, steps.batch))
        mixed.append(step_parts(machine, steps.mixed, steps.batch))
        chunks.append(steps.mixed_share)
        eff, rates = machine.efficiency, machine.rates
        assert rates is not None
        dense_in = "float4" if point.weight_dtype == "nvfp4" else machine.compute_dtype
        expert_in = "float4" if point.weight_dtype in ("nvfp4", "mxfp4") else dense_in
        peaks = machine.device.peak_flops
        formats.append(
            [
                [n == "float8_e4m3" for n in (dense_in, expert_in)],
                [n == "float4" and "float4" in peaks for n in (dense_in, expert_in)],
                [point.weight_dtype == "fp8-block"] * 2,
                [eff.fp8, eff.fp4, eff.blocks],
            ]
        )
    names = ("decode", "mixed")
    return {
        **{n: np.array(v, float).T for n, v in zip(names, (decode, mixed), strict=True)},
        "chunks": np.array(chunks),
        "fp8": np.array([f[0] for f in formats], bool).T,
        "fp4": np.array([f[1] for f in formats], bool).T,
        "blocks": np.array([f[2] for f in formats], bool).T,
        "backend": np.array([backends().index(str(row.point.backend)) for row in rows]),
        "newer": np.array([row.point.device == "b200" for row in rows]),
        "pool": np.array([row.point.decode is not None for row in rows]),
    }


SHARES = {
    "bandwidth": 0.88, "compute": 0.85, "expert_bandwidth": 0.9, "expert_compute": 0.7,
    "kv_bandwidth": 0.9, "latent_compute": 1.0, "prompt_compute": 0.8, "fp8": 1.0, "fp4": 1.0,
    "blocks": 1.0, "link": 1.0,
}  # fmt: skip
"""The parameters that are shares, with their upper limits."""
SECONDS = {
    "latent_layer_s": 1e-5,
    "run_s": 2e-6,
    "collective_s": 5e-6,
    "host": 0.8,
}
BY_BACKEND = {"step_s": 5e-4, "layer_s": 3e-5, "routed_layer_s": 3e-5, "disaggregated": 0.7}


def parameters() -> tuple[list[str], NDArray[Any], NDArray[Any]]:
    """Names, logarithms of the starting values, and of the upper limits."""
    engines = backends()
    names = [*SHARES, *SECONDS, *(f"{n} {b}" for n in BY_BACKEND for b in engines)]
    start = [0.6 * limit for limit in SHARES.values()]
    start += [*SECONDS.values(), *(v for v in BY_BACKEND.values() for _ in engines)]
    upper = [*SHARES.values(), *(v * 30 for v in SECONDS.values())]
    upper += [
        v * 30 if n != "disaggregated" else 1.0 for n, v in BY_BACKEND.items() for _ in engines
    ]
    return names, np.log(start), np.log(upper)


def seconds(value: Mapping[str, float], data: Mapping[str, Any], step: str) -> NDArray[Any]:
    part, engines = data[step], backends()
    share = [
        np.where(data["fp8"][i], value["fp8"], 1.0)
        * np.where(data["fp4"][i], value["fp4"], 1.0)
        * np.where(data["blocks"][i], value["blocks"], 1.0)
        for i in (0, 1)
    ]

    def own(name: str) -> NDArray[Any]:
        return np.array([value[f"{name} {engine}"] for engine in engines])[data["backend"]]

    # Rates in `part` are those of the present table without its format factors.
    busy = np.maximum(part[0] / value["bandwidth"], part[1] / (value["compute"] * share[0]))
    busy += np.maximum(
        part[2] / value["expert_bandwidth"], part[3] / (value["expert_compute"] * share[1])
    )
    busy += np.maximum(part[4] / value["bandwidth"], part[5] / value["compute"])
    latent = np.where(part[12] > 0, value["latent_compute"], 1.0)
    busy += np.maximum(part[6] / value["kv_bandwidth"], part[7] / latent)
    busy += np.maximum(part[8] / value["kv_bandwidth"], part[9] / value["prompt_compute"])
    layers = own("step_s") + part[10] * own("layer_s") + part[11] * own("routed_layer_s")
    layers += part[12] * value["latent_layer_s"]
    layers *= np.where(data["newer"], value["host"], 1.0)
    overhead = layers + part[13] * value["run_s"]
    return busy + overhead + part[14] * value["collective_s"] + part[15] / value["link"]


def tpot(value: Mapping[str, float], data: Mapping[str, Any]) -> NDArray[Any]:
    decode = seconds(value, data, "decode")
    found = decode + data["chunks"] * np.maximum(seconds(value, data, "mixed") - decode, 0.0)
    pools = np.array([value[f"disaggregated {engine}"] for engine in backends()])[data["backend"]]
    return found * np.where(data["pool"], pools, 1.0)


def unscaled(data: dict[str, NDArray[Any]], rows: Sequence[Row]) -> None:
    """Take the format factors of the present table out of the compute parts."""
    for step in ("decode", "mixed"):
        for at, index in ((1, 0), (3, 1)):
            for name in ("fp8", "fp4", "blocks"):
                now = getattr(efficiency_of(find_accelerator(rows[0].point.device)), name)
                data[step][at] *= np.where(data[name][index], now, 1.0)


def present_values() -> dict[str, float]:
    """The present table by the names of the parameters."""
    hopper = {name: efficiency_of(find_accelerator("h100-sxm"), name) for name in backends()}
    first = next(iter(hopper.values()))
    values = {name: getattr(first, name) for name in (*SHARES, *SECONDS) if name != "host"}
    values |= {
        f"{n} {engine}": getattr(eff, n) for engine, eff in hopper.items() for n in BY_BACKEND
    }
    newer = efficiency_of(find_accelerator("b200"), backends()[0])
    return {**values, "host": newer.step_s / first.step_s}


def check_sums(data: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Stop unless these sums give the decode steps that Replica gives, by the present table.

    They may differ by 1 %: `compute` is capped by device there.
    """
    here = seconds(present_values(), data, "decode")
    for row, found in zip(rows, here, strict=True):
        point, machine = row.point, machine_of(row.point)
        workers = point.decode.workers if point.decode else 1
        batch = max(1, math.ceil(point.batch / workers / machine.layout.num_attention))
        step = machine.uniform(batch, 1, point.isl + point.osl // 2, sampled=batch)
        if abs(found / step.seconds - 1) > 0.01:
            raise SystemExit(
                f"the fit adds up {found:.6f} s where predict has {step.seconds:.6f}: {point}"
            )


def fit(rows: Sequence[Row]) -> None:
    data, (names, start, upper) = features(rows), parameters()
    unscaled(data, rows)
    check_sums(data, rows)
    measured = np.array([row.tpot_s for row in rows])
    weight = np.sqrt([0.0 if row.kept else row.weight for row in rows])

    def residuals(logs: NDArray[Any]) -> NDArray[Any]:
        found = tpot(dict(zip(names, np.exp(logs), strict=True)), data)
        return np.concatenate([weight * np.log(found / measured), 0.05 * (logs - start)])

    best = least_squares(
        residuals, start, bounds=(upper - 12, upper), loss="soft_l1", f_scale=0.2
    ).x
    for name, log in zip(names, best, strict=True):
        print(f"{name} = {math.exp(log):.3g}")
    found = tpot(dict(zip(names, np.exp(best), strict=True)), data) / measured - 1
    kept = [(e, row.weight) for e, row in zip(found, rows, strict=True) if row.kept]
    print("kept points:", summary(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("points", type=Path)
    parser.add_argument("--fit", action="store_true")
    chosen = parser.parse_args()
    rows = read(chosen.points)
    if chosen.fit:
        fit(rows)
    else:
        errors(rows)


if __name__ == "__main__":
    main()
