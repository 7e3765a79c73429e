"""Choosing a backend: automatic, by name, and refused with reasons."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import ridgeline.engine.attention as family
from ridgeline.engine.attention.base import AttentionSite
from ridgeline.errors import BadInput, CannotRun

SITE = AttentionSite(torch.device("cpu"), torch.float32, block_size=16, head_dims=(64,))


def test_auto_takes_the_best_that_runs() -> None:
    runs = [name for name in family.AUTO if not family.attention_backend_of(name).why_not(SITE)]
    name, reasons = family.choose("auto", SITE)
    assert name == runs[0] and name in reasons[-1]


def test_auto_says_why_it_passes_over_backends_that_run_on_request() -> None:
    assert not set(family.ON_REQUEST) & set(family.AUTO)
    _, reasons = family.choose("auto", SITE)
    said = {
        name: [r for r in reasons if r.startswith(f"not {name}: ")] for name in family.ON_REQUEST
    }
    assert said["flex"] and "only if asked for" in said["flex"][0]
    assert said["flashinfer"] and "runs on CUDA only" in said["flashinfer"][0]
    assert family.choose("flex", SITE) == ("flex", ("as requested",))


def test_reference_only_when_asked() -> None:
    assert family.choose("reference", SITE)[0] == "reference"
    assert "reference" not in family.AUTO


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(BadInput, match=r"flash9.*auto, .*torch, reference"):
        family.choose("flash9", SITE)


def test_a_backend_that_cannot_run_is_refused_by_name_and_skipped_by_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {
        "torch": SimpleNamespace(why_not=lambda site: ("needs CUDA", "needs head_dim 128")),
        "other": SimpleNamespace(why_not=lambda site: ()),
    }
    monkeypatch.setattr(family, "attention_backend_of", lambda name: kinds[name])
    monkeypatch.setattr(family, "AUTO", ("torch", "other"))
    monkeypatch.setattr(family, "ON_REQUEST", {})
    with pytest.raises(CannotRun, match="needs CUDA; needs head_dim 128"):
        family.choose("torch", SITE)
    name, reasons = family.choose("auto", SITE)
    assert name == "other" and "needs CUDA" in reasons[0]
    monkeypatch.setattr(family, "AUTO", ("torch",))
    with pytest.raises(CannotRun, match="needs CUDA"):
        family.choose("auto", SITE)
