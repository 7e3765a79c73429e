"""Attention over a KV cache in INT4 against its definition, in float64 and number by number."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline import _native
from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.full import FullAttention, piecewise_attention
from ridgeline.engine.attention.int4.format import decode_groups, encode_groups
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.attention.native import ISA_VARIABLE
from ridgeline.engine.scheduler.plan import Run
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost.kv_layout import kv_layout
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import with_dtype, with_kv_dtype
from tests.conformance.test_attention import spec_of

SIZE = 32  # tokens of a group
NUM_BLOCKS = 160
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
KINDS: list[tuple[int | None, float | None]] = [(None, None), (40, None), (None, 2.0)]


def make_spec() -> ModelSpec:
    return msgspec.structs.replace(spec_of(HEADS, KV_HEADS, HEAD_DIM, KINDS), kv_dtype="int4")


def make_cache(spec: ModelSpec) -> KvCache:
    sizes = (NUM_BLOCKS, SIZE, torch.float32, "cpu", kv_format("int4"))
    cache = KvCache.allocate(spec, *sizes, layout=kv_layout(spec))
    for tensor in cache.tensors:
        tensor.fill_(0x55)  # what must not be read
    return cache


class Tables:
    """Scattered blocks of one sequence, of which recent ones are given back as it grows."""

    def __init__(self, rng: random.Random) -> None:
        self.free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.full: list[int] = []
        self.windows: list[list[int]] = [[], []]
        self.first = 0

    def run(self, start: int, count: int) -> Run:
        while self.first < start // SIZE:
            self.first += 1
            self.free += [table.pop(0) for table in self.windows if table]
        places = -(-(start + count) // SIZE)
        while len(self.full) < places:
            self.full.append(self.free.pop())
        for table in self.windows:
            while len(table) < places - self.first:
                table.append(self.free.pop())
        windows = tuple(tuple(table) for table in self.windows)
        return Run(
            0, start, (0,) * count, tuple(self.full), None, windows=windows, first_place=self.first
        )


def in_int8(x_D: np.ndarray) -> np.ndarray:
    scale = np.abs(x_D).max() / 127
    return np.array([round(float(x / scale)) * scale for x in x_D])


def in_int4(x_L: np.ndarray) -> np.ndarray:
    """Numbers that share a range, which is stored in float16."""
    least = float(np.float16(x_L.min()))
    scale = float(np.float16((np.float32(x_L.max()) - np.float32(x_L.min())) / 15))
    codes = [min(15, max(0, round((float(x) - least) / scale))) for x in x_L]
    return np.array([code * scale + least for code in codes])


def slow_attention(
    q_THD: Tensor, kv_T2KD: Tensor, window: int | None, softcap: float | None, scale: float
) -> np.ndarray:
    """o_THD of a whole sequence: own group in INT8, earlier ones in 4 bits."""
    num_tokens = len(q_THD)
    recent = np.apply_along_axis(in_int8, -1, kv_T2KD.double().numpy())
    coded = recent.copy()
    for first in range(0, num_tokens - SIZE + 1, SIZE):
        group = slice(first, first + SIZE)
        coded[group, 0] = np.apply_along_axis(in_int4, 0, recent[group, 0])
        for chunk in range(0, HEAD_DIM, 32):
            part = (group, 1, slice(None), slice(chunk, chunk + 32))
            coded[part] = np.apply_along_axis(in_int4, -1, recent[part])
    out = np.zeros(q_THD.shape)
    for p in range(num_tokens):
        low = 0 if window is None else max(0, p - window + 1)
        own = p // SIZE * SIZE
        seen = np.concatenate([coded[low:own], recent[max(low, own) : p + 1]])
        for head in range(HEADS):
            k_LD, v_LD = seen[:, :, head // (HEADS // KV_HEADS)].transpose(1, 0, 2)
            scores = k_LD @ q_THD[p, head].double().numpy() * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[p, head] = weights @ v_LD / weights.sum()
    return out


def random_text(seed: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Queries, and keys with a loud channel; values on the grid's edges would round either way."""
    generator = torch.Generator().manual_seed(seed)
    q_THD = torch.randn(num_tokens, HEADS, HEAD_DIM, generator=generator)
    kv_T2KD = torch.randn(num_tokens, 2, KV_HEADS, HEAD_DIM, generator=generator)
    kv_T2KD[:, 0, :, 3] += 12
    return q_THD, kv_T2KD


def in_steps(
    q_THD: Tensor,
    kv_T2KD: Tensor,
    steps: list[int],
    layer: int,
    seed: int,
    backend: str = "torch",
) -> Tensor:
    spec = make_spec()
    attention = build_attention(backend, spec, make_cache(spec))
    tables, out, start = Tables(random.Random(seed)), [], 0
    for count in steps:
        rows = slice(start, start + count)
        step = attention.prepare([tables.run(start, count)])
        out.append(step(q_THD[rows], kv_T2KD[rows], layer))
        start += count
    return torch.cat(out)


def row_errors(found_THD: Tensor, want_THD: Tensor) -> Tensor:
    return (found_THD - want_THD).flatten(1).norm(dim=1) / want_THD.flatten(1).norm(dim=1)


def variants() -> list[str]:
    """The kernel's variants that this CPU runs."""
    names = ("portable", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512amx")
    return [name for name in names if runs_here(name)]


def runs_here(isa: str) -> bool:
    try:
        _native.attention_rounds("bfloat16", isa)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("layer", range(len(KINDS)))
def test_the_kernel_computes_the_definition_with_the_same_bits_however_it_is_cut(
    isa: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and weights of 16 bits add an error far below that of 4-bit codes."""
    monkeypatch.setenv(ISA_VARIABLE, isa)
    seed = random.randrange(1 << 30)
    q_THD, kv_T2KD = random_text(seed, 100)
    slow = in_steps(q_THD, kv_T2KD, [100], layer, seed)
    whole = in_steps(q_THD, kv_T2KD, [100], layer, seed, "native")
    assert float(row_errors(whole, slow).max()) < 1e-3, seed
    for steps in ([31, 1, 1, 67], [5, 60, 35], [1] * 100):
        assert torch.equal(in_steps(q_THD, kv_T2KD, steps, layer, seed + 1, "native"), whole), seed


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_scored_texts_have_the_results_of_steps(backend: str) -> None:
    """The kernel's rounding is in scores: they are computed by it, in parts or at once."""
    seed = random.randrange(1 << 30)
    q_THD, kv_T2KD = random_text(seed, 100)
    spec = make_spec()
    cache = make_cache(spec)
    begin = piecewise_attention(spec, q_THD, cache, build_attention(backend, spec, cache))
    assert begin is not None
    for layer in range(len(KINDS)):
        want = in_steps(q_THD, kv_T2KD, [100], layer, seed, backend)
        for ends in ([100], [40, 64, 100]):
            text, parts = begin([0] * 100), []
            for start, end in itertools.pairwise([0, *ends]):
                parts.append(text(start, end)(q_THD[start:end], kv_T2KD[start:end], layer))
            found = torch.cat(parts)
            if backend == "native":
                assert torch.equal(found, want), seed
            torch.testing.assert_close(found, want, atol=2e-6, rtol=1e-5)


def test_the_kernel_gives_long_contexts_the_same_bits_on_several_threads() -> None:
    """A context of several chunks is cut where one sequence would leave threads idle."""
    q_THD, kv_T2KD = random_text(11, 1500)
    steps, before = [1400, 99, 1], torch.get_num_threads()
    slow = in_steps(q_THD, kv_T2KD, steps, 0, 11)
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(in_steps(q_THD, kv_T2KD, steps, 0, 11, "native"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    assert float(row_errors(found[0], slow).max()) < 1e-3


def test_the_kernel_computes_a_batch_with_the_bits_of_its_sequences() -> None:
    texts = [random_text(seed, length) for seed, length in ((1, 70), (2, 40))]
    spec = make_spec()
    attention = build_attention("native", spec, make_cache(spec))
    both, other = Tables(random.Random(3)), Tables(random.Random(3))
    other.free = both.free  # one pool
    step = attention.prepare([both.run(0, 70), other.run(0, 40)])
    q_THD, kv_T2KD = (torch.cat(parts) for parts in zip(*texts, strict=True))
    alone = [in_steps(*text, [len(text[0])], 2, 9, "native") for text in texts]
    assert torch.equal(step(q_THD, kv_T2KD, 2), torch.cat(alone))


def test_the_kernel_adds_sinks_to_the_softmax() -> None:
    q_THD, kv_T2KD = random_text(4, 70)
    spec, sinks_H = make_spec(), torch.randn(HEADS)
    found = []
    for backend in ("torch", "native"):
        attention = build_attention(backend, spec, make_cache(spec))
        step = attention.prepare([Tables(random.Random(1)).run(0, 70)])
        found.append(step(q_THD, kv_T2KD, 0, sinks_H))
    assert float(row_errors(found[1], found[0]).max()) < 1e-3


def test_the_kernel_refuses_tables_that_are_too_short() -> None:
    run = Tables(random.Random(1)).run(0, 70)
    q_THD, kv_T2KD = random_text(4, 70)
    spec = make_spec()
    attention = build_attention("native", spec, make_cache(spec))
    short = msgspec.structs.replace(
        run,
        start=65,
        tokens=(0,),
        blocks=run.blocks[:1],
        windows=tuple(table[2:] for table in run.windows),
        first_place=2,
    )
    with pytest.raises(ValueError, match="table is too short"):
        attention.prepare([short])(q_THD[:1], kv_T2KD[:1], 0)


@pytest.mark.parametrize("layer", range(len(KINDS)))
def test_steps_compute_the_definition_however_the_text_is_cut(layer: int) -> None:
    seed = random.randrange(1 << 30)
    num_tokens = random.Random(seed).randint(70, 100)
    q_THD, kv_T2KD = random_text(seed, num_tokens)
    spec = make_spec()
    window, softcap = KINDS[layer]
    want = torch.from_numpy(
        slow_attention(q_THD, kv_T2KD, window, softcap, spec.layers[0].attention.scale)
    )
    whole = in_steps(q_THD, kv_T2KD, [num_tokens], layer, seed)
    rows = row_errors(whole, want)
    # A number between two codes may be rounded to the other one; few rows can be affected.
    assert float(rows.median()) < 1e-5 and float(rows.max()) < 0.05, seed
    for steps in ([31, 1, 1, num_tokens - 33], [5, 60, num_tokens - 65], [1] * num_tokens):
        pieces = in_steps(q_THD, kv_T2KD, steps, layer, seed + 1)
        torch.testing.assert_close(pieces, whole, atol=2e-6, rtol=1e-5)
    text = FullAttention(spec, num_tokens, q_THD)(q_THD, kv_T2KD, layer)
    torch.testing.assert_close(text, whole, atol=2e-6, rtol=1e-5)


def test_rejected_drafts_that_filled_a_group_leave_no_trace() -> None:
    """Drafts at 30 to 35 fill a group and code it; 31 tokens on, other ones are right."""
    q_THD, kv_T2KD = random_text(5, 70)
    want = in_steps(q_THD, kv_T2KD, [31, 39], 0, 5)
    spec = make_spec()
    attention, tables = build_attention("torch", spec, make_cache(spec)), Tables(random.Random(5))
    attention.prepare([tables.run(0, 30)])(q_THD[:30], kv_T2KD[:30], 0)
    drafts = torch.randn(6, 2, KV_HEADS, HEAD_DIM)
    drafts[0] = kv_T2KD[30]
    attention.prepare([tables.run(30, 6)])(q_THD[30:36], drafts, 0)
    found = attention.prepare([tables.run(31, 39)])(q_THD[31:], kv_T2KD[31:], 0)
    torch.testing.assert_close(found, want[31:], atol=2e-6, rtol=1e-5)


def test_batched_sequences_are_computed_as_alone() -> None:
    texts = [random_text(seed, 70) for seed in (1, 2)]
    spec = make_spec()
    attention = build_attention("torch", spec, make_cache(spec))
    both = Tables(random.Random(3))
    other = Tables(random.Random(3))
    other.free = both.free  # one pool
    rows = [torch.cat([texts[0][i][:70], texts[1][i][:40]]) for i in range(2)]
    step = attention.prepare([both.run(0, 70), other.run(0, 40)])
    found = step(rows[0], rows[1], 0)
    torch.testing.assert_close(found[:70], in_steps(*texts[0], [70], 0, 9), atol=2e-6, rtol=1e-5)
    want = in_steps(texts[1][0][:40], texts[1][1][:40], [40], 0, 9)
    torch.testing.assert_close(found[70:], want, atol=2e-6, rtol=1e-5)


def test_groups_survive_coding_within_half_a_step() -> None:
    kv_X2KBD = torch.randn(3, 2, KV_HEADS, SIZE, HEAD_DIM)
    kv_X2KBD[:, 0, :, :, 7] *= 30
    tiles = encode_groups(kv_X2KBD)
    assert tiles.shape[-1] == kv_format("int4").width(HEAD_DIM) == 5 * HEAD_DIM // 8
    error = (decode_groups(tiles, HEAD_DIM, torch.float32) - kv_X2KBD).abs()
    keys, values = kv_X2KBD.unbind(1)
    key_step = (keys.amax(-2, keepdim=True) - keys.amin(-2, keepdim=True)) / 15
    chunks = values.unflatten(-1, (-1, 32))
    value_step = ((chunks.amax(-1) - chunks.amin(-1)) / 15).repeat_interleave(32, -1)
    assert bool((error[:, 0] < 0.51 * key_step + 0.02).all())
    assert bool((error[:, 1] < 0.51 * value_step + 0.02).all())
    again = encode_groups(decode_groups(tiles, HEAD_DIM, torch.float32))
    assert torch.isfinite(decode_groups(again, HEAD_DIM, torch.float32)).all()


@pytest.mark.parametrize("value", [0.0, 1e-40, -3e4, 1e30])
def test_extreme_numbers_stay_numbers(value: float) -> None:
    tiles = encode_groups(torch.full((1, 2, 1, SIZE, HEAD_DIM), value))
    assert torch.isfinite(decode_groups(tiles, HEAD_DIM, torch.float32)).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 48}, "not multiples of 32 channels"),
        ({"chunk": 64}, "attention in chunks"),
        ({"shares_kv": True}, "no KV cache"),
    ],
)
def test_models_that_cannot_be_stored_are_refused(change: dict[str, Any], reason: str) -> None:
    spec = spec_of(HEADS, KV_HEADS, HEAD_DIM, [(None, None)])
    attention = msgspec.structs.replace(spec.layers[0].attention, **change)
    layers = (msgspec.structs.replace(spec.layers[0], attention=attention),)
    with pytest.raises(CannotRun, match=reason):
        with_kv_dtype(msgspec.structs.replace(spec, layers=layers), "int4")


def test_layout_counts_the_blocks_of_coded_and_recent_tokens() -> None:
    spec = with_kv_dtype(with_dtype(load_spec("demo"), "float32"), "int4")
    layout = kv_layout(spec)
    assert layout.num_groups == 3 and layout.block_tokens == SIZE
    for context in (1, 32, 33, 320):
        assert layout.decode_blocks(context, SIZE) == -(-context // SIZE) + 2
    cache = KvCache.allocate(spec, 10, SIZE, torch.float32, "cpu", kv_format("int4"), layout=layout)
    assert cache.nbytes == 10 * layout.block_bytes(SIZE)


def test_models_without_groups_of_keys_keep_their_layout() -> None:
    """Planning counts bytes of any model; only the engine refuses it."""
    spec = make_spec()
    attention = msgspec.structs.replace(spec.layers[0].attention, head_dim=48)
    layers = (msgspec.structs.replace(spec.layers[0], attention=attention),)
    assert kv_layout(spec).recent
    assert not kv_layout(msgspec.structs.replace(spec, layers=layers)).recent
