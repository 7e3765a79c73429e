"""Every attention backend against the float64 oracle: fresh random inputs, odd sizes, scattered
blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.engine.attention import BACKENDS, attention_kind, build_attention
from ridgeline.engine.attention.base import Site
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.core.plan import Run
from ridgeline.spec.format import dense
from ridgeline.spec.model import (
    AttentionSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
)

FAST = [name for name in BACKENDS if name != "reference"]
NUM_BLOCKS = 48
JUNK = 50.0  # what lies in blocks and positions that nobody may read


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
) -> Scene:
    """`shapes` are (computed tokens, new tokens) of each run."""
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
        torch.randn(total, 2, heads[1], head_dim, dtype=dtype),
        (_junk_cache(spec, block_size, dtype), _junk_cache(spec, block_size, dtype)),
    )
    _write_context(scene)
    return scene


def _junk_cache(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> KvCache:
    cache = KvCache.allocate(spec, NUM_BLOCKS, block_size, dtype, "cpu")
    for layer in cache.layers:
        layer.fill_(JUNK)
    return cache


def _write_context(scene: Scene) -> None:
    for run in scene.runs:
        for position in range(run.start):
            for layer in range(len(scene.spec.layers)):
                ours, theirs = (cache.layers[layer] for cache in scene.caches)
                at = (run.blocks[position // ours.shape[3]], position % ours.shape[3])
                ours[at[0], :, :, at[1]] = torch.randn_like(ours[0, :, :, 0])
                theirs[at[0], :, :, at[1]] = ours[at[0], :, :, at[1]]


def check(backend: str, scene: Scene, tolerance: float = 2e-6) -> None:
    """`backend` against the oracle on every kind of layer, row by row, and the caches
    afterwards."""
    fast = build_attention(backend, scene.spec, scene.caches[0]).prepare(scene.runs)
    slow = build_attention("reference", scene.spec, scene.caches[1]).prepare(scene.runs)
    q_before, kv_before = scene.q_THD.clone(), scene.kv_T2KD.clone()
    for layer, kind in enumerate(KINDS):
        got = fast(scene.q_THD, scene.kv_T2KD, layer).float()
        want = slow(scene.q_THD, scene.kv_T2KD, layer).float()
        assert got.shape == want.shape
        error = float((got - want).norm() / want.norm())
        assert error < tolerance, (kind, error)
        rows = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
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
def test_bfloat16(backend: str) -> None:
    shapes = [(20, 1), (0, 9), (17, 4), (31, 1)]
    scene = make_scene(random.Random(9), shapes, dtype=torch.bfloat16)
    site = Site.of(scene.spec, torch.device("cpu"), torch.bfloat16, 4)
    if why_not := attention_kind(backend).why_not(site):
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
    """A run gives the same rows alone as beside others."""
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
    site = Site.of(spec, torch.device("cpu"), torch.float32, 4)
    assert site.has_softcap and site.has_window and site.head_dims == (8,)
    assert all(
        isinstance(reason, str) and reason for reason in attention_kind(backend).why_not(site)
    )
