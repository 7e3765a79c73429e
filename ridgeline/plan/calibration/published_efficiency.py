"""Published efficiencies: the share of a device's peaks that inference engines reach."""

from __future__ import annotations

import math
import tomllib
from functools import lru_cache
from importlib.resources import files
from typing import Any

import msgspec

from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import Accelerator

_MEDIAN_TO_SIGMA = 0.6745  # the median of |x| of a standard normal
COVERAGE = 0.8
_Z = 1.2816  # a standard normal lies within ±1.2816 with probability 0.8


class Efficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far from the dense peaks the parts of a step are, and what they cost besides.

    Shares of the peaks: `bandwidth` and `compute` of linears that every token uses, `expert_*` of
    routed experts, `kv_bandwidth` and `latent_compute` of decode attention (the latter of latent
    attention, in its absorbed form), `prompt_compute` of prompts' attention. `fp8` and `fp4` are
    further factors on the compute share of linears and experts in those formats, and `blocks` on
    those with a scale per block. `link`: share of the link's rate that collectives reach.

    Grouped products of experts compute whole tiles of `expert_tile` rows. A token's hidden state
    crosses the memory `activation_passes` times in every layer besides the products (norms,
    residuals, rotary embeddings, conversions), and `expert_passes` times for every expert that the
    token chooses (permutation).

    Seconds: `step_s` per step, `layer_s` per layer, `routed_layer_s` and `latent_layer_s` per layer
    with experts and with latent attention, `run_s` per sequence, `collective_s` per collective and
    device beyond the first.

    In a closed loop a prompt also takes `first_s` outside its steps, waits `wait_steps` decode
    steps, and for a share `together` of the other clients' prompts, of which half are before it;
    `pool_first_s` and `pool_together` are those of a pool that only computes prompts.

    `measured_weight`: share of a measured operator's time in the mean, in logarithms, with its
    analytic one.

    `disaggregated`: factor on the decode steps of a pool that only decodes. `tpot_error`,
    `ttft_error`: median relative error to expect; `routed_tpot_error` of models with routed
    experts, and `pool_tpot_error` of decode pools, where they are larger.
    """

    bandwidth: float
    compute: float
    expert_bandwidth: float
    expert_compute: float
    kv_bandwidth: float
    latent_compute: float
    prompt_compute: float
    fp8: float = 1.0
    fp4: float = 1.0
    blocks: float = 1.0
    link: float
    expert_tile: int = 1
    activation_passes: float = 0.0
    expert_passes: float = 0.0
    step_s: float
    layer_s: float
    routed_layer_s: float = 0.0
    latent_layer_s: float = 0.0
    run_s: float
    collective_s: float
    first_s: float = 0.0
    wait_steps: float = 0.0
    together: float = 0.0
    pool_first_s: float = 0.0
    pool_together: float = 0.0
    measured_weight: float = 1.0
    disaggregated: float = 1.0
    tpot_error: float
    ttft_error: float
    routed_tpot_error: float = 0.0
    pool_tpot_error: float = 0.0
    source: str
    as_of: str

    def __post_init__(self) -> None:
        shares = {
            name: getattr(self, name)
            for name in self.__struct_fields__
            if name.endswith(("bandwidth", "compute")) or name in ("fp8", "fp4", "blocks", "link")
        }
        for name, share in shares.items():
            if not 0 < share <= 1:
                raise BadInput(
                    f"an efficiency must be a share of the dense peak: {name}",
                    value=share,
                    limit="(0, 1]",
                )
        if not (self.source.strip() and self.as_of.strip()):
            raise BadInput("an efficiency row needs a source and a date", value=self.source)

    def ttft_s(self, prompt_s: float, tpot_s: float, clients: float) -> float:
        """Seconds to the first token in a closed loop of `clients`, whose prompts take `prompt_s`
        alone."""
        others = clients - 1
        waiting = (
            self.together * prompt_s * others / 2 + self.wait_steps * tpot_s * others / clients
        )
        return self.first_s + prompt_s + waiting

    def pool_ttft_s(self, prompt_s: float, clients: float) -> float:
        """`ttft_s` where prompts have dedicated replicas."""
        return self.pool_first_s + prompt_s * (1 + self.pool_together * (clients - 1) / 2)

    def compute_share(self, dtype: str, share: float, *, blocks: bool = False) -> float:
        """`share` of the peak, for products in `dtype`."""
        share *= {"float8_e4m3": self.fp8, "float4": self.fp4}.get(dtype, 1.0)
        return share * (self.blocks if blocks else 1.0)


def backends() -> tuple[str, ...]:
    """Inference engines with separate overheads in the efficiency table."""
    return tuple(row["name"] for row in _document()["backend"])


def efficiency_of(
    device: Accelerator, backend: str | None = None, *, measured: bool = False
) -> Efficiency:
    """The published efficiency of a device under an engine.

    `backend` None: the mean of the engines' overheads. `measured`: overheads next to operators that
    were measured. `compute` is capped by the share that plain matrix products reach on
    the device. Raises BadInput for an unknown backend.
    """
    document = _document()
    row = dict(document["default"])
    row |= _backend_row(document["backend"], backend)
    if measured:
        row |= document["measured"]["default"]
        row |= _backend_row(document["measured"]["backend"], backend)
    for specific in document["device"]:
        if device.name in specific["names"]:
            host = specific.get("host", 1.0)
            if measured:
                host = document["measured"]["host"].get(device.name, 1.0)
            for name in ("step_s", "layer_s", "routed_layer_s", "latent_layer_s"):
                row[name] *= host
            row |= {k: value for k, value in specific.items() if k not in ("names", "host")}
            row["source"] = f"{document['default']['source']}; {specific['source']}"
    if measured:
        row["source"] = document["measured"]["default"]["source"]
    if device.achievable is not None:
        row["compute"] = min(row["compute"], device.achievable)
    return msgspec.convert(row, Efficiency)


class FittedParameter(msgspec.Struct, frozen=True, kw_only=True):
    """A number of the step-time model: its value, and the 80 % interval of fits to other draws of
    the measurement campaigns. `engine`: whose it is, "" where all engines share it."""

    name: str
    engine: str
    value: float
    low: float
    high: float
    as_of: str


def fitted_parameters(device: Accelerator) -> tuple[FittedParameter, ...]:
    """The fitted numbers that predictions on a device use, before `host` scales the engines'."""
    document = _document()
    intervals = dict(document["interval"])
    as_of = intervals.pop("as_of")
    default, rows = document["default"], {row["name"]: row for row in document["backend"]}
    hosts = [row.get("host") for row in document["device"] if device.name in row["names"]]
    found = []
    for key, (low, high) in intervals.items():
        name, _, engine = key.partition(" ")
        value = rows[engine][name] if engine else default.get(name)
        if name == "host":
            value = next((host for host in hosts if host is not None), None)
        if value is not None:
            found.append(
                FittedParameter(
                    name=name, engine=engine, value=value, low=low, high=high, as_of=as_of
                )
            )
    return tuple(found)


def _backend_row(rows: list[dict[str, Any]], backend: str | None) -> dict[str, float]:
    if backend is None:
        names = [name for name in rows[0] if name != "name"]
        return {name: sum(row[name] for row in rows) / len(rows) for name in names}
    for row in rows:
        if row["name"] == backend:
            return {name: value for name, value in row.items() if name != "name"}
    raise BadInput("unknown backend", value=backend, limit=", ".join(row["name"] for row in rows))


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    text = (
        files("ridgeline.plan.calibration").joinpath("efficiency.toml").read_text(encoding="utf-8")
    )
    return tomllib.loads(text)


def interval(value: float, median_error: float) -> tuple[float, float]:
    """The 80 % interval around a prediction, for log-normal errors with this median."""
    spread = math.exp(_Z * math.log1p(median_error) / _MEDIAN_TO_SIGMA)
    return value / spread, value * spread
