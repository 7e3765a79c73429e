"""Training drafters: it learns, goes on where it was interrupted, and says what it cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ridgeline.compress.drafter_training.students import Teacher, accepted, visible_keys
from ridgeline.compress.drafter_training.train_drafter import (
    DrafterRecipe,
    DrafterTrainingProgress,
    load_teacher,
    most_frequent,
    sample_candidates,
    train,
    windows,
)
from ridgeline.engine.speculate.drafters.checkpoint import CONFIG
from ridgeline.errors import BadInput, CannotRun

pytestmark = pytest.mark.slow

TEXT = [(i * 7 + (i // 5) % 11) % 50 + 40 for i in range(32 * 40)]


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return load_teacher("demo-draft")


def recipe(kind: str, steps: int = 14) -> DrafterRecipe:
    return DrafterRecipe(kind=kind, num_heads=2, steps=steps, batch=4, length=32, rate=5e-3)  # type: ignore[arg-type]


class _Stop(Exception):
    pass


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_it_learns_and_goes_on_where_it_was(teacher: Teacher, tmp_path: Path, kind: str) -> None:
    reports: list[DrafterTrainingProgress] = []
    whole = train(teacher, TEXT, recipe(kind), tmp_path / "whole", reports.append)
    assert reports[-1].step == 14 and whole.acceptance[0] > reports[0].acceptance[0] + 0.02

    def stop(progress: DrafterTrainingProgress) -> None:
        if progress.step == 9:
            raise _Stop

    with pytest.raises(_Stop):
        train(teacher, TEXT, recipe(kind), tmp_path / "cut", stop, save_every_s=0.0)
    assert not (tmp_path / "cut").exists()
    again: list[DrafterTrainingProgress] = []
    train(teacher, TEXT, recipe(kind), tmp_path / "cut", again.append)
    assert again[0].step == 9, "step 9 was reported and not saved yet"
    ours, theirs = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "cut"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not (tmp_path / "cut.partial").exists() and (tmp_path / "cut" / CONFIG).is_file()


def test_another_interrupted_run_is_not_overwritten(teacher: Teacher, tmp_path: Path) -> None:
    def stop(progress: DrafterTrainingProgress) -> None:
        raise _Stop

    with pytest.raises(_Stop):
        train(teacher, TEXT, recipe("medusa"), tmp_path / "x", stop, save_every_s=0.0)
    with pytest.raises(BadInput, match="another training run"):
        train(teacher, TEXT, recipe("medusa", steps=9), tmp_path / "x", stop)


def test_acceptance_is_the_overlap_of_the_distributions() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]])
    q = torch.tensor([[0.2, 0.7, 0.1]])
    _, chance = accepted(q.log(), p.log(), 0.0)
    assert float(chance) == pytest.approx(0.2 + 0.3 + 0.1)
    _, own = accepted(p.log(), p.log(), 1.0)
    assert float(own) == pytest.approx(1.0)


def test_later_passes_see_true_states_and_their_own_path() -> None:
    """The third pass at place 4: true states up to 2, the second pass at 3, itself at 4."""
    true, second, own = visible_keys(6, 2)[4].split(6)
    assert true.tolist() == [True, True, True, False, False, False]
    assert second.tolist() == [False, False, False, True, False, False]
    assert own.tolist() == [False, False, False, False, True, False]


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(BadInput, match="too short"):
        windows(list(range(100)), 32)
    with pytest.raises(CannotRun, match="dummy"):
        load_teacher("dummy:llama-1b")


def test_candidates_are_the_frequent_tokens_and_random_others() -> None:
    frequent_V = most_frequent(torch.tensor([[7, 7, 9], [9, 9, 20_000]]), 30_000)
    assert frequent_V.tolist() == [9, 7, 20_000]
    first, second = (
        sample_candidates(frequent_V, 30_000, torch.Generator().manual_seed(seed))
        for seed in (1, 2)
    )
    assert first is not None and second is not None
    assert first[:3].tolist() == [9, 7, 20_000] and len(first.unique()) == len(first) == 8192
    assert not torch.equal(first, second)
    assert sample_candidates(frequent_V, 8192, torch.Generator()) is None


def test_teacher_scores_candidates_as_it_scores_the_whole_vocabulary(teacher: Teacher) -> None:
    tokens_BL, candidates_V = torch.arange(32).view(2, 16) + 40, torch.tensor([3, 50, 7])
    whole, part = teacher(tokens_BL), teacher(tokens_BL, candidates_V)
    assert torch.equal(whole.h_BLC, part.h_BLC)
    assert torch.allclose(whole.logits_BLV[..., candidates_V], part.logits_BLV, atol=1e-5)


def test_every_window_begins_with_bos() -> None:
    found = windows(list(range(10, 1500)), 8, [1])
    assert found.shape == (1490 // 7, 8) and found[:, 0].eq(1).all()
    assert sorted(found[:, 1:].flatten().tolist()) == list(range(10, 10 + 7 * (1490 // 7)))
