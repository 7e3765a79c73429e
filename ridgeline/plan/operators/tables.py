"""Operator times of one GPU and inference engine, from the package aiconfigurator-core.

The tables (Apache-2.0, ai-dynamo/aiconfigurator) hold milliseconds of products, experts, attention
and all-reduces by shape, measured under each engine. They are read from the installed package and
never copied. Of several versions of an engine, the newest measurement of a shape counts; of several
kernels, the fastest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ridgeline.errors import BadInput, CannotRun
from ridgeline.plan.operators.curves import Curve, CurveFamily, between, neighbours

PACKAGE = "aiconfigurator_core"
SYSTEMS: Mapping[str, str] = MappingProxyType(
    {
        "a100-80-sxm": "a100_sxm",
        "h100-sxm": "h100_sxm",
        "h100-pcie": "h100_pcie",
        "h200-sxm": "h200_sxm",
        "b200": "b200_sxm",
        "b300": "b300_sxm",
        "gb200": "gb200",
        "gb300": "gb300",
        "l4": "l4",
        "l40s": "l40s",
    }
)
"""Our name of a device → the tables' name of its system."""
ROUTING = ("power_law_1.01", "power_law_1.2", "balanced")
"""Distributions of tokens over experts, the most realistic first."""
MS = 1e-3
Key = tuple[Any, ...]


class ExpertShape(NamedTuple):
    """The experts of a layer, and how they are divided over devices."""

    hidden_size: int
    intermediate_size: int
    experts_per_token: int
    num_experts: int
    tp: int
    ep: int


class HeadShape(NamedTuple):
    """The heads of a layer on one device."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int


class OperatorTables:
    """The tables of one system and engine. Seconds, or None for a shape without a measurement."""

    def __init__(self, folder: Path, backend: str) -> None:
        self._folder, self._backend = folder, backend
        self._curves: dict[str, dict[Any, Any]] = {}

    def product_s(self, dtype: str, rows: int, num_out: int, num_in: int) -> float | None:
        """Y[rows, num_out] = X[rows, num_in] W, interpolated over all three sizes."""
        grid = self._products().get(dtype)
        if grid is None:
            return None
        outs, ins, curves = grid
        corners = []
        for out in {*neighbours(outs, num_out)}:
            known = [i for i in {*neighbours(ins, num_in)} if (outs[out], ins[i]) in curves]
            if known:
                corners.append((outs[out], [(ins[i], curves[outs[out], ins[i]]) for i in known]))
        if not corners:
            return None
        lines = [
            (out, _along([(size, curve.at(rows)) for size, curve in sorted(row)], num_in))
            for out, row in sorted(corners)
        ]
        return _along(lines, num_out)

    def experts_s(self, dtype: str, num_tokens: int, shape: ExpertShape) -> float | None:
        """Routed experts of one layer, for the tokens of all attention groups together."""
        curve: Curve | None = self._experts().get((dtype, *shape))
        return None if curve is None else curve.at(num_tokens)

    def decode_attention_s(
        self, kv_dtype: str, shape: HeadShape, batch: int, length: int
    ) -> float | None:
        """Attention of one new token of each of `batch` sequences of `length` tokens."""
        table = "latent_decode" if shape.num_kv_heads == 0 else "decode"
        family: CurveFamily | None = self._attention(table).get((kv_dtype, *shape))
        return None if family is None else family.at(batch, length)

    def prompt_attention_s(
        self, kv_dtype: str, shape: HeadShape, new: int, done: int
    ) -> float | None:
        """Attention of `new` prompt tokens after `done` earlier ones of a sequence."""
        table = "latent_prompt" if shape.num_kv_heads == 0 else "prompt"
        family: CurveFamily | None = self._attention(table).get((kv_dtype, *shape))
        if family is None:
            return None
        alone = family.at(1, new)
        return alone if not done else max(alone, family.at(1, new + done) - family.at(1, done))

    def all_reduce_s(self, num_devices: int, nbytes: float) -> float | None:
        """An all-reduce over the devices of one node."""
        curve: Curve | None = self._load("all_reduce", self._read_all_reduce).get((num_devices,))
        return None if curve is None else curve.at(nbytes)

    # ---- reading -------------------------------------------------------------------------------

    def _products(self) -> dict[Any, Any]:
        return self._load("products", self._read_products)

    def _experts(self) -> dict[Any, Any]:
        return self._load("experts", self._read_experts)

    def _attention(self, table: str) -> dict[Any, Any]:
        return self._load(table, lambda: self._read_attention(table))

    def _load(self, name: str, read: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
        if name not in self._curves:
            self._curves[name] = read()
        return self._curves[name]

    def _read_products(self) -> dict[Any, Any]:
        columns = ("gemm_dtype", "n", "k", "m")
        points = self._points("gemm", "gemm_perf", columns)
        curves: dict[str, dict[tuple[int, int], dict[float, float]]] = {}
        for (dtype, num_out, num_in, rows), seconds in points.items():
            curves.setdefault(dtype, {}).setdefault((num_out, num_in), {})[rows] = seconds
        return {
            dtype: (
                sorted({out for out, _ in shapes}),
                sorted({size for _, size in shapes}),
                {shape: Curve.of(row) for shape, row in shapes.items()},
            )
            for dtype, shapes in curves.items()
        }

    def _read_experts(self) -> dict[Any, Any]:
        columns = (
            *("distribution", "moe_dtype", "hidden_size", "inter_size", "topk", "num_experts"),
            *("moe_tp_size", "moe_ep_size", "num_tokens"),
        )
        points = self._points("moe", "moe_perf", columns)
        chosen: dict[Key, dict[float, float]] = {}
        for routing in reversed(ROUTING):  # the last one that has the point stays
            for (name, *shape, num_tokens), seconds in points.items():
                if name == routing:
                    chosen.setdefault(tuple(shape), {})[num_tokens] = seconds
        return {key: Curve.of(row) for key, row in chosen.items()}

    def _read_attention(self, table: str) -> dict[Any, Any]:
        latent, decodes = table.startswith("latent"), table.endswith("decode")
        phase = "generation" if decodes else "context"
        size = "step" if decodes else "isl"
        if latent:
            columns: tuple[str, ...] = ("kv_cache_dtype", "num_heads", "batch_size", size)
            points = self._points("mla", f"{phase}_mla_perf", columns)
        else:
            columns = (
                *("kv_cache_dtype", "num_heads", "num_key_value_heads", "head_dim", "window_size"),
                *("batch_size", size),
            )
            points = self._points("attention", f"{phase}_attention_perf", columns)
        families: dict[Key, dict[tuple[float, float], float]] = {}
        for (*key, batch, length), seconds in points.items():
            shape = (key[0], key[1], 0, 0, 0) if latent else tuple(key)
            families.setdefault(shape, {})[batch, length + decodes] = seconds
        return {shape: CurveFamily.of(family) for shape, family in families.items()}

    def _read_all_reduce(self) -> dict[Any, Any]:
        columns = ("num_gpus", "message_size")
        found = self._points("comm", "custom_allreduce_perf", columns)
        points: dict[Key, dict[float, float]] = {}
        for (number, size), seconds in found.items():
            points.setdefault((number,), {})[2 * size] = seconds  # sizes count 2-byte elements
        return {key: Curve.of(row) for key, row in points.items()}

    def _points(self, operator: str, name: str, columns: Sequence[str]) -> dict[Key, float]:
        """Seconds by the values of `columns`, of all versions of the engine."""
        points: dict[Key, float] = {}
        for folder in sorted((self._folder / operator / self._backend).glob("*"), key=_version):
            path = folder / f"{name}.parquet"
            if path.is_file():
                names = [*columns, "latency"]
                table = _pyarrow_parquet().read_table(path, columns=names)
                rows = zip(*(table[column].to_pylist() for column in names), strict=True)
                points |= _fastest(rows)
        return points


def _fastest(rows: Iterable[tuple[Any, ...]]) -> dict[Key, float]:
    """Key → seconds."""
    best: dict[Key, float] = {}
    for *key, ms in rows:
        shape = tuple(key)
        if ms > 0:
            best[shape] = min(ms * MS, best.get(shape, ms * MS))
    return best


def _along(points: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds at a size from one or two measured sizes; by size beyond them."""
    if len(points) == 2 and points[0][0] <= size <= points[1][0]:
        (low, at_low), (high, at_high) = points
        return between(size, (low, high), (at_low, at_high))
    near, seconds = points[-1]
    return seconds * max(1.0, size / near)


def _version(folder: Path) -> tuple[tuple[int, str], ...]:
    """1.3.0rc9 before 1.3.0rc10."""
    parts = re.findall(r"\d+|[a-z]+", folder.name)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


def _pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise _missing("pyarrow") from None
    return pyarrow.parquet


def _missing(package: str) -> CannotRun:
    return CannotRun(
        f"--operators measured reads the tables of a package that is not installed: {package}",
        fix="pip install 'ridgeline[silicon]', or leave the option out",
    )


@lru_cache(maxsize=8)
def operator_tables(device: str, backend: str | None) -> OperatorTables:
    """The tables of a device under an engine.

    Raises CannotRun if the package is not installed, BadInput if it has no tables of them.
    """
    package = find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise _missing("aiconfigurator-core")
    _pyarrow_parquet()
    if backend is None:
        raise BadInput(
            "measured operators belong to an engine", fix="add --backend vllm, sglang or trtllm"
        )
    if device not in SYSTEMS:
        raise BadInput(
            "there are no measured operators of this device",
            value=device,
            limit=", ".join(SYSTEMS),
            fix="leave out --operators measured",
        )
    folder = Path(package.submodule_search_locations[0]) / "systems" / "data" / SYSTEMS[device]
    if not (folder / "gemm" / backend).is_dir():
        raise BadInput(
            "the installed tables have no products of this device and engine",
            value=f"{device}, {backend}",
            limit=str(folder / "gemm"),
        )
    return OperatorTables(folder, backend)
