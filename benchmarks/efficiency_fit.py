"""Fits the numbers of `efficiency.toml` to operating points: the same sums as Replica, as arrays.

Every number has a prior: what kernels and engines of this kind reach, and how far, by experience,
they are from it (the standard deviation of the logarithm). Numbers of an engine are a common value
times the engine's own factor, whose prior is 1: an engine or a term that few points speak of stays
near the others, and an engine without points gets the common value. Points of one campaign (model,
device, engine, format, mode, version) share their errors, so that a campaign of n points weighs
n^0.75.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.cost.parameters import count_layers
from ridgeline.plan.calibration.published_efficiency import Efficiency, backends, efficiency_of
from ridgeline.plan.step_time.predict import Prediction
from ridgeline.plan.step_time.replica import Replica

if __package__:
    from benchmarks.published_points import ROOFLINE, Row, loop_steps, machine_of
else:
    from published_points import ROOFLINE, Row, loop_steps, machine_of


class Prior(NamedTuple):
    """A parameter's usual value, the standard deviation of its logarithm, and its upper limit."""

    value: float
    spread: float
    limit: float = math.inf


SHARED: Mapping[str, Prior] = MappingProxyType(
    {
        "bandwidth": Prior(0.8, 0.15, 0.95),
        "compute": Prior(0.75, 0.2, 0.95),
        "expert_bandwidth": Prior(0.75, 0.2, 0.95),
        "expert_compute": Prior(0.6, 0.4, 0.95),
        "kv_bandwidth": Prior(0.8, 0.2, 0.95),
        "latent_compute": Prior(0.6, 0.3, 1.0),
        "prompt_compute": Prior(0.6, 0.4, 0.95),
        "fp8": Prior(0.85, 0.2, 1.0),
        "fp4": Prior(0.7, 0.3, 1.0),
        "blocks": Prior(0.8, 0.2, 1.0),
        "link": Prior(0.6, 0.3, 1.0),
        "activation_passes": Prior(10.0, 0.7),
        "expert_passes": Prior(6.0, 0.7),
        "latent_layer_s": Prior(20e-6, 1.0),
        "run_s": Prior(3e-6, 1.0),
        "collective_s": Prior(1.5e-6, 0.5),
        "host": Prior(0.8, 0.2, 1.0),
    }
)
"""`host`: factor on an engine's seconds per step and layer on the newer systems."""
BY_ENGINE: Mapping[str, Prior] = MappingProxyType(
    {
        "step_s": Prior(300e-6, 1.0),
        "layer_s": Prior(40e-6, 0.7),
        "routed_layer_s": Prior(30e-6, 0.7),
        "disaggregated": Prior(0.6, 0.3, 1.0),
    }
)
FIRST_TOKEN: Mapping[str, Prior] = MappingProxyType(
    {
        "first_s": Prior(0.05, 0.7),
        "wait_steps": Prior(5.0, 1.0),
        "together": Prior(0.12, 0.7, 1.0),
        "pool_first_s": Prior(0.6, 0.7),
        "pool_together": Prior(0.12, 0.7, 1.0),
    }
)
"""Each an engine's own, around a common value."""
FIRST_SPREAD, FIRST_TRUST, FIRST_ROBUST = 0.7, 0.3, 0.1
"""Of an engine's own factor; weight of the priors; as `ROBUST`. Waits depend on how a load
generator starts its requests, which the points do not record: errors are heavy-tailed."""
ENGINE_SPREAD = {"step_s": 2.0}
"""Standard deviation of the logarithm of an engine's own factor, where it is not 1."""
HOST = ("step_s", "layer_s", "routed_layer_s", "latent_layer_s")
NEWER = ("b200", "gb200", "b300", "gb300")
ROBUST = 0.2
"""Relative error from which the loss grows linearly."""
EXPERT_TILE = 64


def priors() -> dict[str, Prior]:
    """All parameters by name: those of an engine are "layer_s" (common) and "layer_s vllm"."""
    own = {
        f"{name} {engine}": Prior(1.0, ENGINE_SPREAD.get(name, 1.0))
        for name in BY_ENGINE
        for engine in backends()
    }
    return {**SHARED, **BY_ENGINE, **own}


def efficiency_from(
    values: Mapping[str, float], device: str, engine: str | None, base: Efficiency | None = None
) -> Efficiency:
    """The efficiency of a device and engine by the fitted values; its other numbers are those of
    `base`, or else of the present table."""
    base = efficiency_of(find_accelerator(device), engine) if base is None else base
    host = values["host"] if device in NEWER else 1.0
    found = {name: values[name] for name in SHARED if name != "host"}
    for name, prior in BY_ENGINE.items():
        found[name] = min(values[name] * values.get(f"{name} {engine}", 1.0), prior.limit)
    found |= {name: found[name] * host for name in HOST}
    achievable = find_accelerator(device).achievable
    found["compute"] = min(found["compute"], achievable or 1.0)
    return replace(base, expert_tile=EXPERT_TILE, **found)


# ---- features ------------------------------------------------------------------------------------


def step_parts(machine: Replica, groups: Sequence[tuple[int, int, int]], sampled: int) -> list[Any]:
    """Seconds at the peaks of each part of a step, and the counts that overheads multiply."""
    terms = machine.step_terms(groups, sampled)
    per_token = machine.wires.per_token_s * sum(count * new for count, new, _ in groups)
    names = ("dense weights", "routed experts", "LM head", "KV cache reads", "prompt attention")
    busy = [seconds for name in names for seconds in terms[name][:2]]
    return [
        *busy,
        terms["activations"].memory_s,
        terms["expert permutation"].memory_s,
        sum(count for count, _, _ in groups),
        machine.wires.fixed_s,
        per_token,
    ]


def features(rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    """What the sums need of every point; independent of the present table."""
    ideal = replace(
        ROOFLINE,
        expert_tile=EXPERT_TILE,
        activation_passes=1.0,
        expert_passes=1.0,
        collective_s=1.0,
    )
    columns: dict[str, list[Any]] = collections.defaultdict(list)
    for row in rows:
        point, machine = row.point, machine_of(row.point, ideal)
        steps = loop_steps(point, machine)
        columns["decode"].append(step_parts(machine, steps.decode, steps.batch))
        columns["mixed"].append(step_parts(machine, steps.mixed, steps.batch))
        columns["mixed_share"].append(steps.mixed_share)
        layers = count_layers(machine.spec)
        columns["layers"].append(
            (
                len(machine.spec.layers),
                sum(n for layer, n in layers.items() if layer.mlp.num_experts),
                sum(n for layer, n in layers.items() if layer.attention.latent is not None),
            )
        )
        dense_in = "float4" if point.weight_dtype == "nvfp4" else machine.compute_dtype
        expert_in = "float4" if point.weight_dtype in ("nvfp4", "mxfp4") else dense_in
        four_bits = "float4" in machine.device.peak_flops
        columns["fp8"].append([n == "float8_e4m3" for n in (dense_in, expert_in)])
        columns["fp4"].append([n == "float4" and four_bits for n in (dense_in, expert_in)])
        columns["blocks"].append([point.weight_dtype == "fp8-block"] * 2)
        columns["engine"].append(backends().index(str(point.backend)))
        columns["newer"].append(point.device in NEWER)
        columns["pool"].append(point.decode is not None)
        columns["achievable"].append(machine.device.achievable or 1.0)
    return {name: np.array(values).T for name, values in columns.items()}


Steps = Callable[[Mapping[str, float], Mapping[str, Any], str], NDArray[Any]]
"""Maps fitted parameters to the seconds of one kind of step, for every point."""


# ---- the sums ------------------------------------------------------------------------------------


def part_seconds(
    value: Mapping[str, float], data: Mapping[str, Any], step: str
) -> dict[str, NDArray[Any]]:
    """Seconds of the parts of the steps named `step` of all points, without the engine's."""
    part, latent = data[step], data["layers"][2]
    shares = [
        np.where(data["fp8"][i], value["fp8"], 1.0)
        * np.where(data["fp4"][i], value["fp4"], 1.0)
        * np.where(data["blocks"][i], value["blocks"], 1.0)
        for i in (0, 1)
    ]
    compute = np.minimum(value["compute"], data["achievable"])
    experts = np.maximum(
        part[2] / value["expert_bandwidth"], part[3] / (value["expert_compute"] * shares[1])
    )
    attention = np.where(latent > 0, value["latent_compute"], 1.0)
    return {
        "products": np.maximum(part[0] / value["bandwidth"], part[1] / (compute * shares[0])),
        "experts": experts + part[11] * value["expert_passes"],
        "head": np.maximum(part[4] / value["bandwidth"], part[5] / compute),
        "decode": np.maximum(part[6] / value["kv_bandwidth"], part[7] / attention),
        "prompt": np.maximum(part[8] / value["kv_bandwidth"], part[9] / value["prompt_compute"]),
        "collectives": part[13] * value["collective_s"] + part[14] / value["link"],
        "activations": part[10] * value["activation_passes"],
    }


def engine_seconds(value: Mapping[str, float], data: Mapping[str, Any], step: str) -> NDArray[Any]:
    """Seconds of the engine in the steps named `step` of all points."""
    layers, routed, latent = data["layers"]
    host = own(value, data, "step_s") + layers * own(value, data, "layer_s")
    host += routed * own(value, data, "routed_layer_s") + latent * value["latent_layer_s"]
    host *= np.where(data["newer"], value["host"], 1.0)
    return host + data[step][12] * value["run_s"]


def step_seconds(value: Mapping[str, float], data: Mapping[str, Any], step: str) -> NDArray[Any]:
    """Seconds of the steps named `step` of all points."""
    parts = part_seconds(value, data, step)
    return sum(parts.values(), start=engine_seconds(value, data, step))


def own(value: Mapping[str, float], data: Mapping[str, Any], name: str) -> NDArray[Any]:
    """The values of each point's engine."""
    factors = [value[name] * value[f"{name} {engine}"] for engine in backends()]
    return np.minimum(factors, BY_ENGINE[name].limit)[data["engine"]]


def tpot(
    value: Mapping[str, float], data: Mapping[str, Any], steps: Steps = step_seconds
) -> NDArray[Any]:
    """Seconds per output token of all points, where `steps` gives those of a step."""
    decode = steps(value, data, "decode")
    mixed = steps(value, data, "mixed")
    found = decode + data["mixed_share"] * np.maximum(mixed - decode, 0.0)
    return found * np.where(data["pool"], own(value, data, "disaggregated"), 1.0)


# ---- the fit -------------------------------------------------------------------------------------


def campaign_weights(rows: Sequence[Row]) -> NDArray[Any]:
    """Weights of the points: 1 / repetitions, and n^0.75 in all for n points of a campaign."""
    total: collections.Counter[Any] = collections.Counter()
    for row in rows:
        total[row.campaign] += row.weight
    return np.array([row.weight * total[row.campaign] ** -0.25 for row in rows])


def fit_values(
    data: Mapping[str, Any],
    measured: NDArray[Any],
    weight: NDArray[Any],
    start: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """The parameters by name; points of weight 0 have no part in them."""
    return fit_parameters(
        priors(), lambda value: np.log(tpot(value, data) / measured), weight, start=start
    )


def fit_parameters(
    known: Mapping[str, Prior],
    errors: Callable[[Mapping[str, float]], NDArray[Any]],
    weight: NDArray[Any],
    *,
    start: Mapping[str, float] | None = None,
    robust: float = ROBUST,
    trust: float = 1.0,
) -> dict[str, float]:
    """The parameters with the least robust sum of squared logarithmic errors and distances from
    their priors, the latter times `trust`."""
    mean = np.log([prior.value for prior in known.values()])
    spread = np.array([prior.spread for prior in known.values()]) / trust
    upper = np.log([prior.limit for prior in known.values()])
    first = mean if start is None else np.log([start[name] for name in known])

    def residuals(logs: NDArray[Any]) -> NDArray[Any]:
        error = errors(dict(zip(known, np.exp(logs), strict=True))) / robust
        lower = np.sign(error) * robust * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))
        return np.concatenate([np.sqrt(weight) * lower, (logs - mean) / spread])

    bounds = (mean - 12, upper)
    logs = least_squares(residuals, np.minimum(first, upper - 1e-9), bounds=bounds).x
    return dict(zip(known, map(float, np.exp(logs)), strict=True))


RESAMPLES, LOW, HIGH = 20, 10, 90


def parameter_intervals(
    rows: Sequence[Row],
    data: Mapping[str, Any],
    measured: NDArray[Any],
    weight: NDArray[Any],
    values: Mapping[str, float],
) -> dict[str, tuple[float, float]]:
    """By parameter as `efficiency_from` gives it ("layer_s vllm": an engine's own): the 10th and
    90th percentile over fits to campaigns that are drawn with replacement."""
    names = sorted({row.campaign for row in rows})
    place = {name: number for number, name in enumerate(names)}
    campaign = np.array([place[row.campaign] for row in rows])
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(RESAMPLES):
        drawn = np.bincount(rng.integers(len(names), size=len(names)), minlength=len(names))
        sample = fit_values(data, measured, weight * drawn[campaign], values)
        for name in SHARED:
            found[name].append(sample[name])
        for name, prior in BY_ENGINE.items():
            for engine in backends():
                own_value = sample[name] * sample[f"{name} {engine}"]
                found[f"{name} {engine}"].append(min(own_value, prior.limit))
    return {
        name: (float(np.percentile(samples, LOW)), float(np.percentile(samples, HIGH)))
        for name, samples in found.items()
    }


def check_sums(values: Mapping[str, float], data: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Stop unless these sums give the decode steps that Replica gives, on every seventh point."""
    here = step_seconds(values, data, "decode")
    for row, found in list(zip(rows, here, strict=True))[::7]:
        point = row.point
        machine = machine_of(point, efficiency_from(values, point.device, point.backend))
        steps = loop_steps(point, machine)
        step = machine.grouped(steps.decode, steps.batch)
        if abs(found / step.seconds - 1) > 1e-6:
            raise SystemExit(
                f"the fit adds up {found:.6f} s where predict has {step.seconds:.6f}: {point}"
            )


def first_token_priors() -> dict[str, Prior]:
    own_factors = {
        f"{name} {engine}": Prior(1.0, FIRST_SPREAD)
        for name in FIRST_TOKEN
        for engine in backends()
    }
    return {**FIRST_TOKEN, **own_factors}


def first_token_from(values: Mapping[str, float], engine: str | None) -> dict[str, float]:
    """The fields of an efficiency that time to the first token needs, under an engine."""
    return {
        name: min(values[name] * values.get(f"{name} {engine}", 1.0), prior.limit)
        for name, prior in FIRST_TOKEN.items()
    }


class FirstTokenData(NamedTuple):
    """What times to the first token depend on, as arrays over points: seconds of a prompt that does
    not wait and of a token, clients of a replica (of a prefill pool's worker), and the engine."""

    prompt_s: NDArray[Any]
    tpot_s: NDArray[Any]
    clients: NDArray[Any]
    pool: NDArray[Any]
    engine: NDArray[Any]


def first_token_data(rows: Sequence[Row], predictions: Sequence[Prediction]) -> FirstTokenData:
    clients = []
    for row in rows:
        point = row.point
        if point.prefill is None:
            groups = machine_of(point, ROOFLINE).layout.num_attention
            clients.append(max(1.0, point.batch / groups))
        else:
            clients.append(math.ceil(point.batch / point.prefill.workers))
    return FirstTokenData(
        prompt_s=np.array([found.prompt_ms / 1000 for found in predictions]),
        tpot_s=np.array([found.tpot_ms / 1000 for found in predictions]),
        clients=np.array(clients, float),
        pool=np.array([row.point.prefill is not None for row in rows]),
        engine=np.array([backends().index(str(row.point.backend)) for row in rows]),
    )


def ttft(value: Mapping[str, float], data: FirstTokenData) -> NDArray[Any]:
    """Seconds to the first token of all points, by the formulas of `Efficiency`."""
    by_engine = [first_token_from(value, engine) for engine in backends()]
    term = {name: np.array([e[name] for e in by_engine])[data.engine] for name in FIRST_TOKEN}
    others = data.clients - 1
    alone = term["first_s"] + data.prompt_s * (1 + term["together"] * others / 2)
    alone += term["wait_steps"] * data.tpot_s * others / data.clients
    pooled = term["pool_first_s"] + data.prompt_s * (1 + term["pool_together"] * others / 2)
    return np.where(data.pool, pooled, alone)


def fit_first_token(
    data: FirstTokenData, measured: NDArray[Any], weight: NDArray[Any]
) -> dict[str, float]:
    """The parameters of `ttft` by name; points of weight 0 have no part in them."""
    return fit_parameters(
        first_token_priors(),
        lambda value: np.log(ttft(value, data) / measured),
        weight,
        robust=FIRST_ROBUST,
        trust=FIRST_TRUST,
    )
