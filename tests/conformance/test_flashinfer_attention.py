"""The plans made for FlashInfer, read by a stand-in as FlashInfer documents them, against the
float64 oracle. The library needs a GPU and never ran here."""

from __future__ import annotations

import math
import random
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.engine.attention import build_attention, choose
from ridgeline.engine.attention.base import AttentionSite
from ridgeline.errors import CannotRun
from tests.conformance.test_attention import KINDS, check, make_scene, spec_of


class StandIn:
    """Paged attention by definition, one query and head at a time, from FlashInfer's arguments."""

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert kv_layout == "HND" and workspace.dtype == torch.uint8

    def plan(self, *arguments: Any, **options: Any) -> None:
        self.qo_indptr, self.indptr, self.indices, self.last, *sizes = arguments
        assert all(t.dtype == torch.int32 for t in arguments[:4])
        self.num_heads, self.num_kv_heads, self.head_dim, self.page_size = sizes
        self.options = options
        assert options["causal"]

    def run(self, q: Tensor, cache: Tensor, return_lse: bool = False) -> Any:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        for run in range(len(self.last)):
            pages = self.indices[self.indptr[run] : self.indptr[run + 1]].long()
            keys = (len(pages) - 1) * self.page_size + int(self.last[run])
            kv = cache[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :keys].double()
            first, end = self.qo_indptr[run : run + 2].tolist()
            for row in range(first, end):
                position = keys - (end - row)
                left = self.options["window_left"]
                start = 0 if left < 0 else max(0, position - left)
                for head in range(self.num_heads):
                    own = head // (self.num_heads // self.num_kv_heads)
                    k, v = kv[0, own, start : position + 1], kv[1, own, start : position + 1]
                    scores = k @ q[row, head].double() * self.options["sm_scale"]
                    cap = self.options["logits_soft_cap"]
                    scores = scores if cap is None else cap * torch.tanh(scores / cap)
                    out[row, head] = (torch.softmax(scores, 0) @ v).to(q.dtype)
                    lse[row, head] = torch.logsumexp(scores, 0) / math.log(2)
        return (out, lse) if return_lse else out


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("ridgeline.engine.attention.libraries.flashinfer.WORKSPACE_BYTES", 16)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 2), (6, 1)])
@pytest.mark.parametrize("shapes", [[(9, 1), (3, 1), (16, 1)], [(20, 1), (0, 6), (5, 3), (4, 4)]])
def test_plans_mean_the_same_attention(
    stand_in: None, heads: tuple[int, int], shapes: list[tuple[int, int]]
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    scene = make_scene(random.Random(seed), shapes, heads=heads)
    check("flashinfer", scene)


def test_a_mixed_step_is_planned_once_per_kind_of_layer(
    stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = list[tuple[Any, ...]]()
    plan = StandIn.plan

    def count(self: StandIn, *arguments: Any, **options: Any) -> None:
        planned.append(arguments[4:7])
        plan(self, *arguments, **options)

    monkeypatch.setattr(StandIn, "plan", count)
    scene = make_scene(random.Random(3), [(9, 1), (0, 6), (5, 3)])
    step = build_attention("flashinfer", scene.spec, scene.caches[0]).prepare(scene.runs)
    layers = range(len(scene.spec.layers))
    for layer in (*layers, *layers):
        step(scene.q_THD, scene.kv_T2KD, layer, None)
    kinds = {
        (a.num_heads, a.num_kv_heads, a.head_dim, a.window, a.softcap, a.scale)
        for a in (layer.attention for layer in scene.spec.layers)
    }
    assert len(planned) == 2 * len(kinds)


def test_sinks_follow_from_the_log_sum_exp(stand_in: None) -> None:
    scene = make_scene(random.Random(7), [(9, 1), (3, 2)])
    fast, slow = (
        build_attention(name, scene.spec, cache).prepare(scene.runs)
        for name, cache in zip(("flashinfer", "reference"), scene.caches, strict=True)
    )
    sinks_H = torch.tensor([-3.0, 0.5, 4.0, 200.0])
    got, want = (step(scene.q_THD, scene.kv_T2KD, 0, sinks_H) for step in (fast, slow))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_it_says_why_it_cannot_run() -> None:
    site = AttentionSite.of(spec_of(4, 2, 8, KINDS), torch.device("cpu"), torch.float32, 4)
    with pytest.raises(CannotRun) as refused:
        choose("flashinfer", site)
    for reason in ("CUDA only", "not installed", "bfloat16", "64, 128, 256"):
        assert reason in str(refused.value)
