"""Distillation: its loss against the definition, the cache, and the same student after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ridgeline.compress.distill import distill_model as module
from ridgeline.compress.distill.distill_model import (
    DistillJob,
    DistillProgress,
    DistillRecipe,
    DistillRun,
    distill_model,
    window_order,
)
from ridgeline.compress.distill.losses import text_loss, top_k_divergence
from ridgeline.compress.distill.teacher_cache import TeacherCache, TopLogprobs
from ridgeline.compress.drafter_training.train_drafter import HELD_WINDOWS, windows
from ridgeline.config.compression import DistillFiles, DistillOptions
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.errors import BadInput
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.rewrite import with_dtype
from ridgeline.workflows.shrink.compare_models import ModelToCompare, compare_models
from ridgeline.workflows.shrink.distill import REPORT_FILE, check_options, resolve_models
from tests.compress.small_llama import random_tensors, write

TEXT = [(i * 7 + (i // 5) % 11) % 50 + 40 for i in range(16 * 60)]


def random_logits(seed: int, num_tokens: int = 5, vocab: int = 12) -> torch.Tensor:
    return 2 * torch.randn(num_tokens, vocab, generator=torch.Generator().manual_seed(seed))


def top(logits_TV: torch.Tensor, k: int) -> TopLogprobs:
    values, ids = torch.log_softmax(logits_TV, -1).topk(k, dim=-1)
    return TopLogprobs(ids, values)


def test_the_divergence_of_all_tokens_is_the_full_one() -> None:
    teacher, student = random_logits(1), random_logits(2)
    found = top_k_divergence(student, top(teacher, 12))
    p, q = teacher.softmax(-1), student.softmax(-1)
    assert float(found) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-5)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_divergence_of_a_few_merges_the_others_into_one_class(k: int) -> None:
    teacher, student = random_logits(3), random_logits(4)
    stored = top(teacher, k)
    total = 0.0
    for t in range(5):
        p, q = teacher[t].softmax(-1).tolist(), student[t].softmax(-1).tolist()
        ids = stored.ids_TK[t].tolist()
        pairs = [(p[i], q[i]) for i in ids]
        pairs.append((1 - sum(p[i] for i in ids), 1 - sum(q[i] for i in ids)))
        total += sum(a * torch.tensor(a / b).log().item() for a, b in pairs)
    assert float(top_k_divergence(student, stored)) == pytest.approx(total / 5, rel=1e-4)
    assert float(top_k_divergence(teacher, stored)) == pytest.approx(0.0, abs=1e-6)


def test_the_text_loss_is_that_of_the_next_token() -> None:
    logits = random_logits(5)
    tokens = [3, 1, 4, 1, 5]
    expected = -sum(logits[t].log_softmax(-1)[tokens[t + 1]].item() for t in range(4)) / 4
    assert float(text_loss(logits, tokens)) == pytest.approx(expected, rel=1e-5)


def test_the_cache_returns_what_the_teacher_said(tmp_path: Path) -> None:
    windows_NT = torch.arange(40 * 5).view(40, 5)
    cache = TeacherCache(tmp_path, windows_NT, 3)
    assert cache.missing(40) == [0, 1]
    for chunk in cache.missing(40):
        cache.add(chunk, lambda tokens: random_logits(tokens[0]))
    again = TeacherCache(tmp_path, windows_NT, 3)
    assert again.missing(40) == []
    found, expected = again[33], top(random_logits(33 * 5), 3)
    assert torch.equal(found.ids_TK, expected.ids_TK)
    assert torch.allclose(found.logprobs_TK, expected.logprobs_TK, atol=5e-3)


def test_no_window_is_used_twice_before_all_are() -> None:
    order = window_order(40, DistillRecipe(steps=20, batch=3))
    free = 40 - HELD_WINDOWS
    assert len(order) == 60 and min(order) >= HELD_WINDOWS and max(order) < 40
    assert sorted(order[:free]) == list(range(HELD_WINDOWS, 40))
    assert len(set(order[free:])) == 60 - free


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A teacher, and the same model with noise on its layers."""
    folder = tmp_path_factory.mktemp("pair")
    tensors = random_tensors()
    teacher = write(folder / "teacher", tensors)
    random = torch.Generator().manual_seed(8)
    for name, tensor in tensors.items():
        if "proj" in name:
            noise = 0.1 * torch.randn(tensor.shape, generator=random)
            tensors[name] = (tensor.float() + noise).bfloat16()
    return str(teacher), str(write(folder / "student", tensors))


def train(
    pair: tuple[str, str], output: Path, recipe: DistillRecipe, stop_at: int | None = None
) -> DistillRun:
    def stop(progress: DistillProgress) -> None:
        if progress.stage == "training" and progress.completed == stop_at:
            raise KeyboardInterrupt

    return distill_model(DistillJob(*pair, TEXT, []), recipe, output, stop)


def logprobs(model: str, texts: list[list[int]]) -> list[torch.Tensor]:
    spec = with_dtype(load_spec(model), "float32")
    decoder = load_decoder(model, spec, device="cpu", compute_dtype=torch.float32)
    runner = TorchRunner(decoder, None, None)
    return [runner.logits(tokens).log_softmax(-1) for tokens in texts]


def divergence(p_TV: torch.Tensor, q_TV: torch.Tensor) -> float:
    return float((p_TV.exp() * (p_TV - q_TV)).sum(-1).mean())


def held_loss(teacher: str, student: str, objective: str) -> float:
    """The full divergence from the teacher on the held-out windows, or the loss of their text,
    computed from the two folders.
    """
    held = windows(TEXT, 16)[:HELD_WINDOWS].tolist()
    found = [
        divergence(p, q)
        if objective == "logits"
        else -sum(float(q[t, tokens[t + 1]]) for t in range(15)) / 15
        for tokens, p, q in zip(held, logprobs(teacher, held), logprobs(student, held), strict=True)
    ]
    return sum(found) / len(found)


@pytest.mark.parametrize("objective", ["logits", "sequence"])
def test_the_student_learns_and_continues_after_a_kill(
    pair: tuple[str, str], tmp_path: Path, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVE_EVERY_S", 0.0)
    recipe = DistillRecipe(
        objective=objective,  # type: ignore[arg-type]
        top_k=4096,
        steps=6,
        batch=2,
        length=16,
        rate=3e-3,
    )
    whole = train(pair, tmp_path / "whole", recipe)
    written = str(tmp_path / "whole")
    assert whole.curve[0].held_loss == pytest.approx(held_loss(*pair, objective), rel=3e-3)
    assert whole.curve[-1].held_loss == pytest.approx(
        held_loss(pair[0], written, objective), rel=3e-3
    )
    assert whole.curve[-1].held_loss < 0.97 * whole.curve[0].held_loss
    with pytest.raises(KeyboardInterrupt):
        train(pair, tmp_path / "cut", recipe, stop_at=4)
    assert not (tmp_path / "cut").exists()
    cut = train(pair, tmp_path / "cut", recipe)
    assert cut.curve == whole.curve
    for file in (tmp_path / "whole").glob("*.safetensors"):
        ours, theirs = load_file(file), load_file(tmp_path / "cut" / file.name)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not (tmp_path / "cut.partial").exists()


def test_interrupted_comparison_does_not_train_again(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same job finds its student; another one, or a finished report, is refused."""
    output, recipe = tmp_path / "out", DistillRecipe(steps=2, batch=1, length=16)
    first = train(pair, output, recipe)

    def fail(*arguments: object) -> None:
        raise AssertionError("it trains again")

    monkeypatch.setattr(module, "DistillTraining", fail)
    monkeypatch.setattr(module, "_fill_cache", fail)
    assert train(pair, output, recipe) == first
    check_options(output, DistillOptions())
    with pytest.raises(BadInput, match="the output is there"):
        train(pair, output, DistillRecipe(steps=3, batch=1, length=16))
    (output / REPORT_FILE).write_text("{}", encoding="utf-8")
    with pytest.raises(BadInput, match="the output is there"):
        check_options(output, DistillOptions())


def test_another_interrupted_run_is_not_overwritten(pair: tuple[str, str], tmp_path: Path) -> None:
    recipe = DistillRecipe(steps=4, batch=1, length=16)
    with pytest.raises(KeyboardInterrupt):
        train(pair, tmp_path / "x", recipe, stop_at=1)
    with pytest.raises(BadInput, match="another run"):
        train(pair, tmp_path / "x", DistillRecipe(steps=5, batch=1, length=16))


def test_models_are_judged_in_the_first_ones_terms(pair: tuple[str, str]) -> None:
    judged = [TEXT[i : i + 16] for i in (0, 100)]
    teacher, student = pair
    rows = compare_models(
        [
            ModelToCompare("teacher", teacher),
            ModelToCompare("teacher, INT8", teacher, "int8"),
            ModelToCompare("student", student),
        ],
        judged,
        speed=False,
    )
    assert (rows[0].kl, rows[0].agreement, rows[0].tokens_per_s) == (0.0, 1.0, None)
    pairs = zip(logprobs(teacher, judged), logprobs(student, judged), strict=True)
    expected = sum(divergence(p[:-1], q[:-1]) for p, q in pairs) / 2
    assert rows[2].kl == pytest.approx(expected, rel=1e-2)
    assert 0 < rows[1].kl < rows[2].kl and rows[1].weight_bytes < rows[0].weight_bytes


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"teacher": "demo"}, "a student is needed"),
        ({"student": "demo"}, "a teacher is needed"),
        ({"student": "demo", "from_pruned": Path("x")}, "a student is needed"),
        ({"from_pruned": Path("nowhere")}, "not a folder that"),
    ],
)
def test_missing_models_are_named(files: dict[str, object], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        resolve_models(DistillFiles(output=Path("out"), **files))  # type: ignore[arg-type]


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    for options, reason in (
        (DistillOptions(objective="sequence", top_k=8), "--top-k has no effect"),
        (DistillOptions(objective="sequence", own_tokens=0), "--own-tokens 0"),
    ):
        with pytest.raises(BadInput, match=reason):
            check_options(tmp_path / "out", options)
