"""FlexAttention against the float64 oracle: fresh random inputs, few, as it is slow on a CPU."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine.attention import build_attention, choose
from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.engine import Engine
from ridgeline.errors import CannotRun
from ridgeline.records import Sampling
from tests.conformance.test_attention import KINDS, check, make_scene, spec_of

pytestmark = pytest.mark.slow


@settings(max_examples=1, deadline=None)
@given(seed=st.integers(0, 1 << 30), data=st.data())
def test_random_scenes(seed: int, data: st.DataObject) -> None:
    """Lengths, groups of heads, windows and caps; decoding rows, prompts and later chunks."""
    heads = data.draw(st.sampled_from([(4, 4), (4, 2), (6, 1), (8, 2)]))
    block_size = data.draw(st.sampled_from([3, 4, 16]))
    run = st.tuples(st.integers(0, 11), st.integers(1, 5))
    shapes = data.draw(st.lists(run, min_size=2, max_size=3))
    scene = make_scene(random.Random(seed), shapes, heads=heads, block_size=block_size)
    check("flex", scene)


def test_sinks_and_chunks() -> None:
    """Sinks below, among and far above the scores, and layers that see only their chunk."""
    scene = make_scene(random.Random(5), [(9, 1), (0, 6), (5, 3)], block_size=4)
    attentions = [
        msgspec.structs.replace(scene.spec.layers[i].attention, sinks=True, chunk=chunk)
        for i, chunk in ((0, None), (0, 4), (1, None))
    ]
    layers = [
        msgspec.structs.replace(scene.spec.layers[i], attention=attention)
        for i, attention in enumerate(attentions)
    ]
    spec = msgspec.structs.replace(scene.spec, layers=tuple(layers))
    fast, slow = (
        build_attention(name, spec, cache).prepare(scene.runs)
        for name, cache in zip(("flex", "reference"), scene.caches, strict=True)
    )
    sinks_H = torch.tensor([-3.0, 0.5, 4.0, 200.0])
    for layer in range(len(layers)):
        got, want = (
            step(scene.q_THD, scene.kv_T2KD, layer, sinks_H if layer != 1 else None)
            for step in (fast, slow)
        )
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_engine_gives_the_same_tokens() -> None:
    sampling = Sampling(temperature=0.0, max_tokens=3, ignore_eos=True)
    outputs = []
    for backend in ("flex", "torch"):
        with Engine.open("demo", attention_backend=backend, max_num_seqs=2) as engine:
            assert engine.info.settings["attention_backend"] == backend
            done = engine.generate(["def add(a, b):\n", "import os\n"], sampling)
            outputs.append([completion.tokens for completion in done])
    assert outputs[0] == outputs[1]


def test_it_is_taken_only_if_asked_for() -> None:
    spec = spec_of(4, 2, 8, KINDS)
    site = AttentionSite.of(spec, torch.device("cpu"), torch.float32, 4)
    assert choose("flex", site) == ("flex", ("as requested",))
    assert choose("auto", site)[0] != "flex"
    with pytest.raises(CannotRun, match="INT4"):
        choose("flex", dataclasses.replace(site, kv_dtype="int4"))
