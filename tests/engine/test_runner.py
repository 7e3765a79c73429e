"""TorchRunner turns plans into tokens and log-probabilities, one output per run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from ridgeline import _native
from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution import runner as runner_module
from ridgeline.engine.execution.batch import make_batch
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.scheduler.plan import Run, SamplePoint, StepPlan
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.rewrite import with_dtype, with_kv_dtype
from ridgeline.records import Sampling
from tests.conformance.tiny_models import GREEDY, VOCAB, Loaded, load_ours, make_model

PROMPT = tuple((7 * i + 3) % VOCAB for i in range(23))
AT = SamplePoint(GREEDY, 0, 0, len(PROMPT))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("qwen3")
    make_model("qwen3", path)
    return path


@pytest.fixture
def ours(directory: Path) -> Loaded:
    return load_ours(directory)


def whole(blocks: tuple[int, ...], **changes: Any) -> Run:
    return replace(Run(0, 0, PROMPT, blocks, AT), **changes)


def reference(ours: Loaded, tokens: tuple[int, ...] = PROMPT) -> Tensor:
    return torch.log_softmax(ours.runner.logits(tokens), dim=-1)


def test_runner_builds_the_flat_batch_of_the_plan() -> None:
    runs = [
        Run(0, 4, (10, 11), (0, 1), AT),
        Run(1, 0, (20, 21, 22), (2,), None),
        Run(2, 9, (30,), (3, 4, 5), AT),
    ]
    batch = make_batch(runs, torch.device("cpu"))
    assert batch.tokens_T.tolist() == [10, 11, 20, 21, 22, 30]
    assert batch.positions_T.tolist() == [4, 5, 0, 1, 2, 9]
    assert batch.sampled_rows().tolist() == [1, 5]
    assert batch.end == 10


def test_empty_plan_yields_an_empty_result(ours: Loaded) -> None:
    assert ours.runner.run(StepPlan(0, ())).outputs == ()


def test_outputs_align_with_runs(ours: Loaded) -> None:
    other = Run(1, 0, PROMPT[:9], (20, 21), None)
    plan = StepPlan(0, (other, whole((4, 9, 1, 7, 3))))
    silent, drawn = ours.runner.run(plan).outputs
    assert silent.tokens == () and silent.logprobs == ()
    assert drawn.tokens == (int(reference(ours)[-1].argmax()),)


def test_greedy_takes_the_most_likely_token_and_reports_it(ours: Loaded) -> None:
    (drawn,) = ours.runner.run(StepPlan(0, (whole((4, 9, 1, 7, 3)),))).outputs
    row = reference(ours)[-1]
    assert drawn.tokens[0] == int(row.argmax()) == drawn.logprobs[0].token
    assert drawn.logprobs[0].logprob == pytest.approx(float(row.max()), abs=1e-5)


@pytest.mark.parametrize("cuts", [(23,), (1, 22), (5, 9, 9), (1,) * 23])
@pytest.mark.parametrize("rows_at_a_time", [256, 4])
def test_prompt_logprobs_are_those_of_the_next_prompt_token(
    ours: Loaded, monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...], rows_at_a_time: int
) -> None:
    monkeypatch.setattr(runner_module, "LOGIT_ROWS", rows_at_a_time)
    expected, got, start = reference(ours), [], 0
    for size in cuts:
        end = start + size
        run = whole(
            (4, 9, 1, 7, 3),
            start=start,
            tokens=PROMPT[start:end],
            sample=AT if end == len(PROMPT) else None,
            prompt_logprobs=2,
            next_prompt_token=PROMPT[end] if end < len(PROMPT) else None,
        )
        bystander = Run(1, start, PROMPT[start:end], (20, 21, 22, 23, 24), None)
        (_, result) = ours.runner.run(StepPlan(0, (bystander, run))).outputs
        got += result.prompt_logprobs
        start = end
    assert [entry.token for entry in got] == list(PROMPT[1:])
    for row, entry in zip(expected, got, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-5)
        assert len(entry.top) == 2 and entry.top[0][0] == int(row.argmax())


def test_copies_precede_runs(ours: Loaded) -> None:
    """A sequence is forked within a block: the copy must precede the fork's first write."""
    first = whole((4, 9, 1, 7, 3), tokens=PROMPT[:22], sample=None)
    ours.runner.run(StepPlan(0, (first,)))
    original = Run(0, 22, (PROMPT[22],), (4, 9, 1, 7, 3), AT)
    fork = Run(1, 22, (50,), (4, 9, 1, 7, 8), AT)
    result = ours.runner.run(StepPlan(1, (original, fork), copies=((3, 8),))).outputs
    assert result[0].tokens[0] == int(reference(ours)[-1].argmax())
    assert result[1].tokens[0] == int(reference(ours, (*PROMPT[:22], 50))[-1].argmax())


def test_block_copies_apply_to_every_layer(ours: Loaded) -> None:
    cache = ours.runner.cache
    for layer in cache.layers:
        layer.copy_(torch.randn_like(layer))
    before = [layer.clone() for layer in cache.layers]
    cache.copy_blocks([(3, 8), (3, 9), (5, 1)])
    for old, new in zip(before, cache.layers, strict=True):
        assert torch.equal(new[8], old[3]) and torch.equal(new[9], old[3])
        assert torch.equal(new[1], old[5]) and torch.equal(new[5], old[5])
        assert torch.equal(new[[0, 2, 3, 4, 6]], old[[0, 2, 3, 4, 6]])


def test_seeded_sampling_does_not_depend_on_the_batch(ours: Loaded) -> None:
    warm = SamplePoint(Sampling(temperature=1.0, top_p=0.9), 77, 0, len(PROMPT))
    alone = ours.runner.run(StepPlan(0, (whole((4, 9, 1, 7, 3), sample=warm),))).outputs[0]
    company = [Run(i, 0, PROMPT[: 5 + i], (20 + 3 * i, 21 + 3 * i), AT) for i in range(1, 4)]
    plan = StepPlan(0, (*company, whole((30, 31, 32, 33, 34), sample=warm)))
    assert ours.runner.run(plan).outputs[-1].tokens == alone.tokens


def test_scoring_a_text_leaves_the_cache_unchanged(ours: Loaded) -> None:
    before = [layer.clone() for layer in ours.runner.cache.layers]
    logits_TV = ours.runner.logits(PROMPT)
    assert logits_TV.shape == (len(PROMPT), VOCAB) and logits_TV.dtype == torch.float32
    assert all(map(torch.equal, before, ours.runner.cache.layers))


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_scores_equal_those_of_steps(directory: Path, backend: str, kv: str) -> None:
    """Bit for bit, so that a kernel's rounding shows in quality measurements."""
    spec = with_kv_dtype(with_dtype(load_spec(str(directory)), "float32"), kv)
    decoder = load_decoder(str(directory), spec, device="cpu", compute_dtype=torch.float32)
    caches = [KvCache.allocate(spec, 8, 4, torch.float32, "cpu", kv_format(kv)) for _ in range(2)]
    scoring = TorchRunner(decoder, caches[0], build_attention(backend, spec, caches[0]))
    step = build_attention(backend, spec, caches[1]).prepare([whole((4, 1, 7, 0, 2, 3))])
    batch = make_batch([whole((4, 1, 7, 0, 2, 3))], torch.device("cpu"))
    with torch.inference_mode():
        x_TC = decoder.hidden(batch.tokens_T, batch.positions_T, batch.end, step)
        assert torch.equal(scoring.logits(PROMPT), decoder.logits(x_TC))
    by_torch = TorchRunner(decoder, None, None).logits(PROMPT)
    away = float((scoring.logits(PROMPT) - by_torch).abs().max())
    rounds = backend == "native" and (kv == "int8" or _native.attention_rounds(kv, "auto"))
    if rounds:
        assert away > 1e-5
    elif kv == "float32":  # otherwise a value between two codes may be rounded to the other one
        assert away < 1e-4
