"""Published operating points: reading them, dividing them, and the steps that they consist of.

The points have the columns of the silicon data of ai-dynamo/aiconfigurator (Apache-2.0). They are
divided by a hash of their operating point, so that repeated measurements of one point stay on one
side; "kept" are those that a fit does not see. Each operating point counts once, however often it
was measured.

Two conventions of the data: tp_size is recorded as tp · ep for some layouts of 8 or 4 devices
(tp_size 64 with 8 x 8 experts); and pools of disaggregated points mostly lack their number of
workers, and whether they speculate, so that equal points differ by up to a factor of two.
"""

from __future__ import annotations

import collections
import csv
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.serving_formats import parse_weight_dtype
from ridgeline.plan.calibration.published_efficiency import Efficiency
from ridgeline.plan.step_time.operating_point import OperatingPoint, Pool
from ridgeline.plan.step_time.parallel_layout import layout_from
from ridgeline.plan.step_time.predict import (
    Prediction,
    decode_step_s,
    predict_on,
    predict_pools,
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
    """One measured point. `kept`: not used by the fit; `weight`: 1 / repetitions; `campaign`: the
    points that were measured together."""

    point: OperatingPoint
    group: tuple[str, ...]
    tpot_s: float
    ttft_s: float
    kept: bool
    weight: float
    campaign: tuple[str, ...] = ()


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
            campaign=(
                *(point.model, point.device, str(point.backend), str(point.weight_dtype)),
                *(row["mode"], row["backend_version"]),
            ),
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


@lru_cache(maxsize=1)
def _roomy() -> Any:
    return roomy()


def machine_of(
    point: OperatingPoint, efficiency: Efficiency | None = None, *, measured: bool = False
) -> Replica:
    """The replica of a point, or of its decode pool, on devices with enough memory."""
    place = point.decode or Pool(
        tp=point.tp, attention_dp=point.attention_dp, moe_tp=point.moe_tp, moe_ep=point.ep
    )
    spec = load_planning_spec(point.model)
    machine = build_replica(
        spec,
        _roomy()[point.device],
        layout_from(spec, place.tp, 1, place.moe_ep, place.attention_dp, place.moe_tp),
        weight_dtype=parse_weight_dtype(str(point.weight_dtype)),
        backend=point.backend,
        efficiency=efficiency,
    )
    return with_measured_operators(machine, point.backend) if measured else machine


def predict_with(efficiency: Efficiency, point: OperatingPoint) -> Prediction:
    """`predict` with an efficiency that is not that of the table."""
    machine = machine_of(point, efficiency)
    if point.prefill is None:
        return predict_on(machine, point)
    return predict_pools(
        point, machine_of(replace(point, decode=point.prefill), efficiency), machine
    )


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
