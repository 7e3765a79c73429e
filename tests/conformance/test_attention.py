"""Every attention backend against the float64 oracle: fresh random inputs, odd sizes, scattered
blocks."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline import _native
from ridgeline.engine.attention import BACKENDS, attention_backend_of, build_attention
from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.format import dense
from ridgeline.modelspec.model import (
    AttentionSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
)

pytestmark = pytest.mark.slow

# Triton kernels have their own suite, tests/engine/kernels/triton, FlexAttention and FlashInfer
# files here: they are slow on a CPU, or need a GPU.
FAST = [name for name in BACKENDS if name not in ("reference", "triton", "flex", "flashinfer")]
NUM_BLOCKS = 48
JUNK = 50.0  # value in blocks and positions that must not be read


def spec_of(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kinds: list[tuple[int | None, float | None]],
) -> ModelSpec:
    """A spec with one layer per (window, softcap); only its attention matters."""
    linear = LinearSpec(num_out=8, num_in=8, format=dense("float32"))
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=1.3 * head_dim**-0.5,
        rope=RopeSpec(dim=head_dim, theta=100.0),
        q=linear,
        k=linear,
        v=linear,
        o=linear,
    )
    mlp = MlpSpec(activation="silu", gate=linear, up=linear, down=linear)
    layers = tuple(
        LayerSpec(
            attention=msgspec.structs.replace(attention, window=window, softcap=softcap), mlp=mlp
        )
        for window, softcap in kinds
    )
    return ModelSpec(
        name="attention",
        family="llama",
        vocab_size=8,
        hidden_size=8,
        layers=layers,
        max_positions=4096,
        norm_eps=1e-5,
        lm_head=linear,
        tied_embeddings=True,
        stored_dtype="float32",
    )


KINDS: list[tuple[int | None, float | None]] = [
    (None, None),
    (7, None),
    (None, 2.0),
    (7, 2.0),
    (1, None),
    (23, None),
]


@dataclass
class Scene:
    """Runs, their inputs, and two equal caches filled with junk except for the known context."""

    spec: ModelSpec
    runs: list[Run]
    q_THD: Tensor
    kv_T2KD: Tensor
    caches: tuple[KvCache, KvCache]


def make_scene(
    rng: random.Random,
    shapes: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    kv: str | None = None,
    size: float = 1.0,
) -> Scene:
    """`shapes` are (computed tokens, new tokens) of each run; `kv` a format, None: as computed.

    `size` stretches keys and values.
    """
    torch.manual_seed(rng.randrange(1 << 30))
    spec = spec_of(*heads, head_dim, KINDS)
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    runs = []
    for index, (start, new) in enumerate(shapes):
        blocks = tuple(free.pop() for _ in range(-(-(start + new) // block_size)))
        runs.append(Run(index, start, (0,) * new, blocks, None))
    total = sum(new for _, new in shapes)
    scene = Scene(
        spec,
        runs,
        torch.randn(total, heads[0], head_dim, dtype=dtype) * 1.5,
        torch.randn(total, 2, heads[1], head_dim, dtype=dtype) * size,
        (_junk_cache(spec, block_size, dtype, kv), _junk_cache(spec, block_size, dtype, kv)),
    )
    _write_context(scene, size)
    return scene


def _junk_cache(
    spec: ModelSpec, block_size: int, dtype: torch.dtype, kv: str | None = None
) -> KvCache:
    format = kv_format(kv) if kv else None
    cache = KvCache.allocate(spec, NUM_BLOCKS, block_size, dtype, "cpu", format)
    head_dim = spec.layers[0].attention.head_dim
    for layer in cache.layers:
        rows_N2KBW = cache.format.encode(torch.full((*layer.shape[:-1], head_dim), JUNK))
        layer[:] = cache.format.to_tiles(rows_N2KBW)
    return cache


def _write_context(scene: Scene, size: float) -> None:
    for run in scene.runs:
        for position in range(run.start):
            for layer in range(len(scene.spec.layers)):
                ours, theirs = (cache.layers[layer] for cache in scene.caches)
                block, offset = run.blocks[position // ours.shape[3]], position % ours.shape[3]
                format = scene.caches[0].format
                rows_2KBW = format.from_tiles(ours[block]).clone()
                shape = (*rows_2KBW.shape[:2], scene.q_THD.shape[-1])
                rows_2KBW[:, :, offset] = format.encode(torch.randn(shape) * size)
                ours[block] = theirs[block] = format.to_tiles(rows_2KBW)


def as_taken(scene: Scene, layer: int) -> Tensor:
    """Queries as rounded by a kernel: scaled for exponentials of base two (or for the soft cap), in
    bfloat16."""
    attention = scene.spec.layers[layer].attention
    unit = torch.tensor(attention.scale) * (1.0 if attention.softcap else math.log2(math.e))
    return (scene.q_THD * unit).bfloat16().float() / unit


def sizes_of(scene: Scene, q_THD: Tensor, layer: int) -> Tensor:
    """Results in float32 if no value took from another: the average of the values' sizes."""
    cache, format = scene.caches[1], scene.caches[1].format
    layers, kv_T2KD = list(cache.layers), scene.kv_T2KD.clone()
    rows_N2KBD = format.decode(format.from_tiles(layers[layer]), torch.float32).clone()
    for values in (rows_N2KBD[:, 1], kv_T2KD[:, 1]):
        values.abs_()
    layers[layer] = format.to_tiles(format.encode(rows_N2KBD))
    sizes = KvCache(layers, cache.format, cache.dtype)
    step = build_attention("reference", scene.spec, sizes).prepare(scene.runs)
    return step(q_THD, kv_T2KD, layer).float()


def row_scales(scene: Scene, want_THD: Tensor, layer: int) -> Tensor:
    """[T]: the size to which a row's error is compared: its norm, or that of its summands.

    Values may cancel (a few averaged alike by every head of a group: small keys do that), and an
    error is relative to the values, not to their sum. n values of weights w and sizes v leave
    sqrt(sum (wv)^2) by chance, at least sum(wv) / sqrt(n) (Cauchy-Schwarz).
    """
    window = scene.spec.layers[layer].attention.window or 4096
    seen = [
        min(run.start + index + 1, window) for run in scene.runs for index in range(len(run.tokens))
    ]
    chance_T = (
        sizes_of(scene, scene.q_THD, layer).flatten(1).norm(dim=1) / torch.tensor(seen).sqrt()
    )
    return torch.maximum(want_THD.flatten(1).norm(dim=1), chance_T)


def check_rounded(scene: Scene, got_THD: Tensor, slow: Any, layer: int) -> None:
    """Number by number: weights in bfloat16 err by up to 2^-9 of themselves, and so does their sum,
    so that a result errs by up to 2^-8 of what it would be if no value took from another."""
    q_THD = as_taken(scene, layer)
    want_THD = slow(q_THD, scene.kv_T2KD, layer).float()
    limit_THD = (2**-8 + 5e-4) * sizes_of(scene, q_THD, layer)
    assert got_THD.shape == want_THD.shape
    assert ((got_THD - want_THD).abs() <= limit_THD).all(), (KINDS[layer], got_THD, want_THD)


def check(backend: str, scene: Scene, tolerance: float = 2e-6) -> None:
    """`backend` against the oracle on every kind of layer, row by row, and the caches
    afterwards."""
    fast = build_attention(backend, scene.spec, scene.caches[0]).prepare(scene.runs)
    slow = build_attention("reference", scene.spec, scene.caches[1]).prepare(scene.runs)
    q_before, kv_before = scene.q_THD.clone(), scene.kv_T2KD.clone()
    for layer, kind in enumerate(KINDS):
        got = fast(scene.q_THD, scene.kv_T2KD, layer).float()
        if rounds(backend, scene.caches[0].format.name):
            check_rounded(scene, got, slow, layer)
        else:
            want = slow(scene.q_THD, scene.kv_T2KD, layer).float()
            assert got.shape == want.shape
            scales_T = row_scales(scene, want, layer)
            error = float((got - want).norm() / scales_T.norm())
            assert error < tolerance, (kind, error)
            rows = (got - want).flatten(1).norm(dim=1) / scales_T
            assert float(rows.max()) < 10 * tolerance, (kind, rows)
        assert torch.equal(scene.caches[0].layers[layer], scene.caches[1].layers[layer])
    assert torch.equal(scene.q_THD, q_before) and torch.equal(scene.kv_T2KD, kv_before)


@pytest.mark.parametrize("backend", FAST)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), data=st.data())
def test_random_scenes(backend: str, seed: int, data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from([(4, 4), (4, 2), (6, 1), (3, 3), (8, 2)]))
    head_dim = data.draw(st.sampled_from([2, 6, 8, 20]))
    block_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    room = NUM_BLOCKS * block_size // 4
    context, new = st.integers(0, min(40, room // 2)), st.integers(1, min(9, room // 2))
    shape = st.tuples(context, st.one_of(st.just(1), new))
    shapes = data.draw(st.lists(shape, min_size=1, max_size=4))
    check(
        backend,
        make_scene(
            random.Random(seed), shapes, heads=heads, head_dim=head_dim, block_size=block_size
        ),
    )


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(
    "shapes",
    [
        [(0, 1)],
        [(0, 13)],
        [(30, 1)],
        [(3, 1), (40, 1), (4, 1), (5, 1), (39, 1)],
        [(20, 1), (0, 9), (17, 4), (31, 1)],
    ],
    ids=["one-row", "prompt", "one-decode", "decodes", "mixed"],
)
def test_shapes(backend: str, shapes: list[tuple[int, int]]) -> None:
    check(backend, make_scene(random.Random(3), shapes))


@pytest.mark.parametrize("backend", FAST)
def test_long_prompt_is_cut_into_spans(backend: str) -> None:
    """Longer than one span of queries, from zero and onto a context."""
    check(backend, make_scene(random.Random(5), [(0, 300), (37, 270)], block_size=16), 3e-6)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("kv", ["float32", "int8", "fp8"])
def test_sinks_take_part_in_the_softmax(backend: str, kv: str) -> None:
    """Sinks below, among and far above the scores; in short runs, and in one cut into chunks."""
    shapes = [(40, 1), (0, 9), (700, 1), (17, 4)]
    scene = make_scene(random.Random(17), shapes, block_size=32, kv=kv)
    layers = tuple(
        msgspec.structs.replace(
            layer, attention=msgspec.structs.replace(layer.attention, sinks=True)
        )
        for layer in scene.spec.layers
    )
    scene.spec = msgspec.structs.replace(scene.spec, layers=layers)
    fast = build_attention(backend, scene.spec, scene.caches[0]).prepare(scene.runs)
    slow = build_attention("reference", scene.spec, scene.caches[1]).prepare(scene.runs)
    sinks_H = torch.tensor([-3.0, 0.5, 4.0, 200.0])
    for layer in range(len(KINDS)):
        got = fast(scene.q_THD, scene.kv_T2KD, layer, sinks_H)
        want = slow(scene.q_THD, scene.kv_T2KD, layer, sinks_H)
        torch.testing.assert_close(got, want, atol=2e-2 if kv == "int8" else 1e-5, rtol=1e-5)
        without = slow(scene.q_THD, scene.kv_T2KD, layer)
        assert (want - without)[:, 2].abs().max() > 0.1
        assert want[:, 3].abs().max() < 1e-20


@pytest.mark.parametrize("backend", FAST)
def test_bfloat16(backend: str) -> None:
    shapes = [(20, 1), (0, 9), (17, 4), (31, 1)]
    scene = make_scene(random.Random(9), shapes, dtype=torch.bfloat16)
    site = AttentionSite.of(scene.spec, torch.device("cpu"), torch.bfloat16, 4)
    if why_not := attention_backend_of(backend).why_not(site):
        pytest.skip("; ".join(why_not))
    check(backend, scene, 1e-2)


@pytest.mark.parametrize("backend", FAST)
def test_a_shared_block_serves_two_sequences(backend: str) -> None:
    """A prefix hit: the second run reads the first one's blocks."""
    scene = make_scene(random.Random(11), [(8, 3), (8, 1)])
    first, second = scene.runs
    shared = msgspec.structs.replace(second, blocks=(*first.blocks[:2], second.blocks[2]))
    scene.runs[1] = shared
    check(backend, scene)


@pytest.mark.parametrize("backend", FAST)
def test_company_changes_nothing(backend: str) -> None:
    """A run gives the same rows alone and together with others."""
    scene = make_scene(random.Random(13), [(21, 1), (5, 6), (22, 1), (3, 1)])
    together = build_attention(backend, scene.spec, scene.caches[0]).prepare(scene.runs)
    alone = build_attention(backend, scene.spec, scene.caches[1])
    for layer in range(len(KINDS)):
        all_rows, row = together(scene.q_THD, scene.kv_T2KD, layer), 0
        for run in scene.runs:
            rows = slice(row, row + len(run.tokens))
            mine = alone.prepare([run])(scene.q_THD[rows], scene.kv_T2KD[rows], layer)
            assert float((mine - all_rows[rows]).abs().max()) < 2e-6
            row = rows.stop


@pytest.mark.parametrize("backend", FAST)
def test_backend_says_why_not_in_words(backend: str) -> None:
    spec = spec_of(4, 2, 8, KINDS)
    site = AttentionSite.of(spec, torch.device("cpu"), torch.float32, 4)
    assert site.has_softcap and site.has_window and site.head_dims == (8,)
    assert all(
        isinstance(reason, str) and reason for reason in attention_backend_of(backend).why_not(site)
    )


STORED = ["float32", "bfloat16", "float16", "int8", "fp8"]


def backends_of(kv: str, head_dim: int = 8) -> list[str]:
    """The fast backends that read this format on this CPU; at least one always does."""
    site = AttentionSite(torch.device("cpu"), torch.float32, 4, (head_dim,), kv_dtype=kv)
    names = [name for name in FAST if not attention_backend_of(name).why_not(site)]
    assert names
    return names


@pytest.mark.parametrize("kv", STORED)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 30), data=st.data())
def test_stored_formats(kv: str, seed: int, data: st.DataObject) -> None:
    """Same bytes in the cache as the oracle's, bit for bit, and its attention over them."""
    heads = data.draw(st.sampled_from([(4, 4), (4, 2), (6, 1), (8, 2)]))
    head_dim = data.draw(st.sampled_from([2, 20, 64, 80, 96, 128, 256]))
    block_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    shapes = data.draw(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 5)), max_size=3))
    shapes = [*(shapes if block_size > 1 else shapes[:1]), (7, 1)]
    size = data.draw(st.sampled_from([1.0, 1e-3, 30.0]))
    for backend in backends_of(kv, head_dim):
        scene = make_scene(
            random.Random(seed),
            shapes,
            heads=heads,
            head_dim=head_dim,
            block_size=block_size,
            kv=kv,
            size=size,
        )
        check(backend, scene, tolerance_of(backend, kv, size))


def test_values_that_cancel() -> None:
    """Small keys: every head averages alike, here five values to a 30th of what they are."""
    for backend in backends_of("int8", 2):
        scene = make_scene(
            random.Random(32108582),
            [(2, 3), (7, 1)],
            heads=(6, 1),
            head_dim=2,
            kv="int8",
            size=1e-3,
        )
        check(backend, scene, tolerance_of(backend, "int8", 1e-3))


def rounds(backend: str, kv: str) -> bool:
    isa = os.environ.get("RIDGELINE_NATIVE_ISA", "auto")
    return backend == "native" and _native.attention_rounds(kv, isa)


def tolerance_of(backend: str, kv: str, size: float) -> float:
    """Float rounding; native int8 also rounds queries and weights to 16 bits (bfloat16 where the
    CPU multiplies it: `check_rounded`).

    A query of normal numbers then errs by up to max|q| / 65534 = 6e-5 an element, a score by about
    3.5e-5 (its root mean square; the sum over the head is divided by the root of its length), and a
    weight by as much of itself: 1e-4 is three times that. Scores of large keys are large,
    and so is what a rounded query does to them.
    """
    if backend == "native" and kv == "int8":
        return 1e-4 if size <= 1 else 2e-3
    return 5e-6 if size <= 1 else 1e-4


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("isa", ["portable", "auto"])
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 4), (64, 16)], ids=["odd", "tiles"])
def test_extreme_rows_stay_numbers(
    kv: str, isa: str, head_dim: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros, numbers without a reciprocal and huge ones among usual ones: no NaN, no infinity."""
    monkeypatch.setenv("RIDGELINE_NATIVE_ISA", isa)
    for backend in backends_of(kv, head_dim):
        scene = make_scene(
            random.Random(1),
            [(5, 16), (9, 1)],
            head_dim=head_dim,
            block_size=block_size,
            kv=kv,
        )
        scene.kv_T2KD[0] = 0.0
        scene.kv_T2KD[1] = 1e-40
        scene.kv_T2KD[2, 1] = 1e30
        scene.kv_T2KD[3, 0] = -3e4
        step = build_attention(backend, scene.spec, scene.caches[0]).prepare(scene.runs)
        for layer in range(len(KINDS)):
            assert torch.isfinite(step(scene.q_THD, scene.kv_T2KD, layer)).all()


def native_rows(
    scene: Scene, runs: list[Run], rows: list[range], num_threads: int, monkeypatch: Any
) -> list[Tensor]:
    """[layer]: out_THD of the native backend, the runs computed one step after another."""
    native = build_attention("native", scene.spec, scene.caches[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    outs = [torch.zeros_like(scene.q_THD) for _ in KINDS]
    for run, row in zip(runs, rows, strict=True):
        step = native.prepare([run])
        for layer, out_THD in enumerate(outs):
            at = slice(row.start, row.stop)
            out_THD[at] = step(scene.q_THD[at], scene.kv_T2KD[at], layer)
    return outs


CUTS = [*((kv, 20) for kv in STORED), ("bfloat16", 64), ("int8", 64), ("fp8", 64)]


@pytest.mark.skipif("native" not in backends_of("float32"), reason="no native kernels here")
@pytest.mark.parametrize("isa", ["portable", "auto"])
@pytest.mark.parametrize(("kv", "head_dim"), CUTS)
def test_native_is_bit_identical_however_it_is_cut(
    kv: str, head_dim: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together = alone = chunked = any thread count, bit for bit; contexts of several chunks.

    Heads of 64 are multiplied by tiles where the CPU has them.
    """
    monkeypatch.setenv("RIDGELINE_NATIVE_ISA", isa)
    shapes = [(900, 70), (1100, 1), (0, 75), (530, 3)]
    heads = (6, 2)
    rng = random.Random(17)
    scene = make_scene(rng, shapes, head_dim=head_dim, block_size=64, heads=heads, kv=kv)
    native = build_attention("native", scene.spec, scene.caches[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    step = native.prepare(scene.runs)
    want = [step(scene.q_THD, scene.kv_T2KD, layer) for layer in range(len(KINDS))]
    for size, num_threads in ((1000, 1), (1000, 4), (64, 2), (7, 3), (1, 2)):
        runs, rows, row = [], [], 0
        for run in scene.runs:
            for first in range(0, len(run.tokens), size):
                piece = run.tokens[first : first + size]
                runs.append(Run(len(runs), run.start + first, piece, run.blocks, None))
                rows.append(range(row, row + len(piece)))
                row += len(piece)
        got = native_rows(scene, runs, rows, num_threads, monkeypatch)
        for layer, kind in enumerate(KINDS):
            assert torch.equal(got[layer], want[layer]), (kind, size, num_threads)


ROUNDING = [
    isa
    for isa in ("avx512amx", "avx512pairs")
    if isa in _native.linear_isas().split(",") and _native.attention_rounds("bfloat16", isa)
]


@pytest.mark.skipif(not ROUNDING, reason="no tiles and no pairs of bfloat16 here")
@pytest.mark.parametrize("rounding", ROUNDING)
def test_bfloat16_is_multiplied_where_the_cpu_can(
    rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are not those of floats, bit for bit, which shows products in use; INT8's are."""
    for kv, same in (("bfloat16", False), ("float16", True), ("int8", True)):
        outs = []
        for isa in (rounding, "avx512vnni"):
            monkeypatch.setenv("RIDGELINE_NATIVE_ISA", isa)
            scene = make_scene(random.Random(23), [(70, 40)], head_dim=64, block_size=16, kv=kv)
            step = build_attention("native", scene.spec, scene.caches[0]).prepare(scene.runs)
            outs.append(step(scene.q_THD, scene.kv_T2KD, 0))
        assert torch.equal(*outs) == same, kv
        # avx512vnni multiplies floats; these round queries and weights too
        assert float((outs[0] - outs[1]).norm() / outs[1].norm()) < (0 if same else 4e-3) + 1e-9


def test_int8_error_is_half_a_step() -> None:
    """Each number within half of scale = max|x| / 127, and the scale travels in the row."""
    x_XD = torch.randn(50, 64) * torch.logspace(-6, 6, 50).unsqueeze(1)
    format = kv_format("int8")
    stored_XW = format.encode(x_XD)
    assert stored_XW.shape == (50, format.width(64)) and stored_XW.dtype == torch.int8
    step_X1 = x_XD.abs().amax(dim=1, keepdim=True) / 127
    error_XD = (format.decode(stored_XW, torch.float32) - x_XD).abs()
    assert bool((error_XD <= 0.5001 * step_X1).all()) and bool(error_XD.any())


def test_fp8_error_is_a_sixteenth_of_each_number() -> None:
    """Three bits of mantissa down to 2^-6 of a 448th of the largest, even steps below it."""
    x_XD = torch.randn(50, 64) * torch.logspace(-6, 6, 50).unsqueeze(1)
    format = kv_format("fp8")
    stored_XW = format.encode(x_XD)
    assert stored_XW.shape == (50, format.width(64)) and stored_XW.dtype == torch.int8
    scale_X1 = x_XD.abs().amax(dim=1, keepdim=True) / 448
    error_XD = (format.decode(stored_XW, torch.float32) - x_XD).abs()
    limit_XD = torch.maximum(x_XD.abs() / 16, scale_X1 * 2**-10)
    assert bool((error_XD <= 1.0001 * limit_XD).all()) and bool(error_XD.any())


@pytest.mark.parametrize("kv", STORED)
def test_copied_blocks_carry_their_scales(kv: str) -> None:
    cache = make_scene(random.Random(2), [(8, 4)], kv=kv).caches[0]
    for layer in cache.layers:
        layer[3] = cache.format.to_tiles(cache.format.encode(torch.randn(2, 2, 4, 8) * 7))
    cache.copy_blocks([(3, 5)])
    for layer in cache.layers:
        assert torch.equal(layer[5], layer[3]) and not torch.equal(layer[5], layer[4])
