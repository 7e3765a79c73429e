"""The verifier on rows of logits: who is walked, who is judged; rows stay where they are."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from ridgeline.engine.sampling import probabilities, sample
from ridgeline.engine.sampling.verify.rejection_sampling import DRAFT, draw, uniform_numbers
from ridgeline.engine.sampling.verify.verifier import DraftDistributions, Verifier
from ridgeline.engine.scheduler.plan import Run, SamplePoint, sample_points
from ridgeline.records import Sampling

V = 5
GREEDY = Sampling(temperature=0.0, logprobs=1)
WARM = Sampling(temperature=0.8, top_k=4)


def run(seq_id: int, drafts: tuple[int, ...], sampling: Sampling, seed: int = 1) -> Run:
    at = SamplePoint(sampling, seed, 7, 3)
    return Run(seq_id, 9, (1, *drafts), (0,), at, num_drafts=len(drafts))


def test_results_align_with_their_runs() -> None:
    """A prompt in the making, plain decoding, a walk, a judged draft, side by side."""
    logits_SV = torch.randn(7, V, generator=torch.Generator().manual_seed(3))
    best = logits_SV.argmax(1).tolist()
    wrong = (best[2] + 1) % V
    runs = [
        Run(0, 0, (1, 2), (0,), None),
        run(1, (), GREEDY),
        run(2, (best[1], wrong), GREEDY),
        run(3, (2, 3), WARM),
    ]
    drawn = DraftDistributions()
    drawn.record(3, (2, 3, 4), torch.full((3, V), 1 / V, dtype=torch.float64))
    at = [sample_point for r in runs for sample_point in sample_points(r)]
    silent, plain, walked, judged = Verifier("standard", drawn).accept(logits_SV, runs, at)
    assert silent == [] and [t for t, _ in plain] == best[:1]
    assert [t for t, _ in walked] == best[1:3]
    assert walked[1][1] is not None and walked[1][1].token == best[2]
    assert 1 <= len(judged) <= 3 and judged[0][1] is None
    alone = Verifier("standard", drawn).accept(logits_SV[4:], runs[3:], at[4:])
    assert alone == [judged]
    drawn.clear()
    plain_at = Verifier("standard", drawn).accept(logits_SV[4:], runs[3:], at[4:])
    assert plain_at[0][0] == sample(logits_SV[4:5], at[4:5])[0]


@pytest.mark.parametrize("seed", range(8))
def test_greedy_verification_equals_the_general_path(seed: int) -> None:
    """The short way of greedy steps gives, and shows, what the usual one does."""
    rng = random.Random(seed)
    runs = [
        run(i, tuple(rng.randrange(2) for _ in range(rng.randrange(4))), GREEDY) for i in range(5)
    ]
    logits_SV = torch.randn(sum(r.max_outputs for r in runs), V) + torch.tensor([2.0, 2, 0, 0, 0])
    at = [sample_point for r in runs for sample_point in sample_points(r)]
    seen: list[list[tuple[int, list[int]]]] = []
    for witnessed in (False, True):
        shown: list[tuple[int, list[int]]] = []
        note = lambda r, chosen, to=shown: to.append((r.seq_id, [t for t, _ in chosen]))  # noqa: E731
        verifier = Verifier(row_observer=note if witnessed else None)
        usual = [tuple(t for t, _ in c) for c in verifier.accept(logits_SV, runs, at)]
        assert verifier.accept_argmax(logits_SV.argmax(1).tolist(), runs) == usual
        seen.append(shown)
    assert not seen[0] and seen[1][:5] == seen[1][5:] and len(seen[1]) == 10


@pytest.mark.slow
def test_verified_drafts_keep_the_distribution() -> None:
    """The first token of a step, over many seeds, after temperature and top-k."""
    logits_SV = torch.tensor([[1.0, 0.5, 0.2, -0.3, 2.0], [0.0, 1.0, 0.0, 0.0, 0.0]])
    q_V = torch.tensor([0.1, 0.4, 0.1, 0.2, 0.2], dtype=torch.float64)
    counts: Counter[int] = Counter()
    for seed in range(3000):
        [number] = uniform_numbers(seed, 7, 1, DRAFT)
        draft = draw(q_V, number)
        drawn = DraftDistributions()
        drawn.record(0, (draft,), q_V[None])
        one = run(0, (draft,), WARM, seed)
        [given] = Verifier("block", drawn).accept(logits_SV, [one], sample_points(one))
        counts[given[0][0]] += 1
    p_V = probabilities(logits_SV[:1], sample_points(run(0, (), WARM)))[0].tolist()
    assert p_V[3] == 0 and counts[3] == 0
    kept = [token for token in range(V) if p_V[token]]
    assert chisquare([counts[t] for t in kept], [3000 * p_V[t] for t in kept]).pvalue > 1e-3
