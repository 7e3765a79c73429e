"""Self-speculation: with all layers it drafts the model's own tokens; its cache writes; the layers
left out."""

from __future__ import annotations

import dataclasses
import time
from unittest import mock

import msgspec
import pytest
import torch

from ridgeline import Engine, Sampling
from ridgeline.config.settings import settings_from
from ridgeline.engine.build import EngineParts, assemble
from ridgeline.engine.config import resolve
from ridgeline.engine.sampling.verify.verifier import DraftDistributions
from ridgeline.engine.scheduler.plan import Run, StepPlan
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.config import resolve_speculation
from ridgeline.engine.speculate.drafters.layer_skip import (
    SelfDrafter,
    best_depth,
    choose_layers,
    influences,
)
from ridgeline.engine.speculate.drafters.target_model import TargetModel
from ridgeline.errors import BadInput, CannotRun

GREEDY = Sampling(temperature=0.0, max_tokens=64, ignore_eos=True)
TEXT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"
ALL = (0, 1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def parts() -> EngineParts:
    return assemble(
        resolve(
            settings_from({"model": "demo", "kv_cache_memory_bytes": 16 << 20, "num_threads": 1})
        )
    )


@pytest.fixture(scope="module")
def target(parts: EngineParts) -> TargetModel:
    return TargetModel(parts.runner.decoder, parts.runner.cache, "native", "torch")


def drafter(target: TargetModel, kept: tuple[int, ...] = ALL, draws: bool = False) -> SelfDrafter:
    return SelfDrafter(target, kept, drawn=DraftDistributions(), draws=draws)


def contexts(
    parts: EngineParts, tokens: list[int], num_blocks: int, sampling: Sampling = GREEDY
) -> DraftContext:
    """The sequence with all but its last token computed."""
    blocks = tuple(range(3, 3 + num_blocks))
    for layer in parts.runner.cache.layers:
        layer.zero_()
    parts.runner.run(StepPlan(0, (Run(0, 0, tuple(tokens[:-1]), blocks, None),)))
    return DraftContext(0, tokens, 1, "", sampling, 5, 99, len(tokens) - 1, blocks)


def test_drafting_with_all_layers_reproduces_the_answer(
    parts: EngineParts, target: TargetModel
) -> None:
    tokens = parts.tokenizer.encode(TEXT)
    [drafts] = drafter(target).draft([contexts(parts, tokens, 9)], [6])
    with Engine.open("demo", kv_cache_memory_bytes=16 << 20, num_threads=1) as engine:
        [expected] = engine.generate([TEXT], Sampling(temperature=0.0, max_tokens=6))
    assert drafts == expected.tokens


def test_drafting_writes_only_uncomputed_slots_of_kept_layers(
    parts: EngineParts, target: TargetModel
) -> None:
    tokens, kept = parts.tokenizer.encode(TEXT)[:40], (0, 2, 5)
    each = contexts(parts, tokens, 3)
    before = [layer.clone() for layer in parts.runner.cache.layers]
    [drafts] = drafter(target, kept).draft([each], [4])
    assert len(drafts) == 4
    for i, (old, new) in enumerate(zip(before, parts.runner.cache.layers, strict=True)):
        changed = {tuple(at) for at in (old != new).any(-1).any(2).any(1).nonzero().tolist()}
        places = {(each.blocks[p // 16], p % 16) for p in range(len(tokens) - 1, len(tokens) + 3)}
        assert changed == (places if i in kept else set())


@pytest.mark.parametrize(("num_tokens", "depth"), [(32, 1), (31, 2), (29, 4), (17, 5)])
def test_a_draft_ends_where_the_block_ends(
    parts: EngineParts, target: TargetModel, num_tokens: int, depth: int
) -> None:
    tokens = parts.tokenizer.encode(TEXT * 2)[:num_tokens]
    [drafts] = drafter(target).draft([contexts(parts, tokens, 2)], [5])
    assert len(drafts) == depth


def test_nothing_is_drafted_without_slots_or_far_behind(
    parts: EngineParts, target: TargetModel
) -> None:
    tokens = parts.tokenizer.encode(TEXT * 4)[:90]
    nothing = DraftContext(0, tokens, 1, "", GREEDY, 5, 99, 89, ())
    behind = DraftContext(1, tokens, 1, "", GREEDY, 5, 99, 0, tuple(range(6)))
    assert drafter(target).draft([nothing, behind], [3, 3]) == [(), ()]


def test_sampled_drafts_carry_their_distribution(parts: EngineParts, target: TargetModel) -> None:
    tokens, own = parts.tokenizer.encode(TEXT), drafter(target, (0, 1, 3, 5), draws=True)
    warm = contexts(parts, tokens, 9, Sampling(temperature=1.1, top_k=20))
    [drafts] = own.draft([warm], [3])
    _, rows = own._drawn._rows[0]
    assert torch.allclose(rows.sum(1), torch.ones(3).double())
    assert bool(((rows > 0).sum(1) <= 20).all())
    assert all(row[token] > 0 for row, token in zip(rows, drafts, strict=True))
    own.draft([contexts(parts, tokens, 9, Sampling(temperature=1.0, seed=3))], [3])
    assert not own._drawn._rows


def test_identity_layers_are_skipped(target: TargetModel, parts: EngineParts) -> None:
    """Two blocks are made to pass their input on: they go first, and nothing disagrees."""
    decoder = target.decoder
    idle = {1, 4}
    blocks = tuple(
        mock.Mock(side_effect=lambda x, *_: x) if i in idle else block
        for i, block in enumerate(decoder.blocks)
    )
    tokens = parts.tokenizer.encode(TEXT * 3)[:64]
    with mock.patch.object(decoder, "body", dataclasses.replace(decoder.body, blocks=blocks)):
        found = influences(decoder, tokens)
    assert sorted(range(6), key=found.__getitem__)[:2] == [1, 4]
    assert found[1] == pytest.approx(0.0, abs=1e-6) and min(found[0], found[2]) > 1e-3


@pytest.mark.slow
def test_best_measured_layer_set_is_chosen(target: TargetModel, parts: EngineParts) -> None:
    tokens = parts.tokenizer.encode(TEXT * 3)[:64]
    kept = choose_layers(target, tokens, 3, time.perf_counter, 60.0)
    assert 1 <= len(kept.layers) < 6 and kept.layers == tuple(sorted(kept.layers))
    assert 0 <= kept.agreement <= 1 and kept.cost > 0 and 1 <= kept.depth <= 3
    hurried = choose_layers(target, tokens, 3, time.perf_counter, 0.0)
    assert len(hurried.layers) == 5


def test_depth_and_gain_follow_from_agreement_and_cost() -> None:
    flat = [1.0] * 5
    assert best_depth(0.5, 0.0, flat) == (4, pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625))
    assert best_depth(0.5, 10.0, flat) == (1, pytest.approx(1.5 / 11))
    assert best_depth(0.8, 0.0, [1, 1, 9, 9, 9]) == (1, pytest.approx(1.8))


def test_impossible_self_drafting_configs_are_refused() -> None:
    config = {"method": "self", "model": "demo-draft"}
    asked = settings_from({"model": "demo", "speculative_config": config})
    with pytest.raises(BadInput, match="means nothing"):
        resolve(asked)
    asked = settings_from({"model": "demo", "speculative_config": {"method": "self"}})
    one = resolve(settings_from({"model": "demo"})).spec
    with pytest.raises(CannotRun, match="one layer"):
        resolve_speculation(asked, msgspec.structs.replace(one, layers=one.layers[:1]), 99, {})


@pytest.mark.parametrize("key", ["draft_sample_method", "rejection_sample_method"])
def test_self_drafting_needs_no_model_for_its_sampling_methods(key: str) -> None:
    value = {"draft_sample_method": "greedy", "rejection_sample_method": "standard"}[key]
    asked = settings_from({"model": "demo", "speculative_config": {"method": "self", key: value}})
    found = resolve_speculation(asked, resolve(settings_from({"model": "demo"})).spec, 99, {})
    assert found is not None
    assert getattr(found, key) == value
