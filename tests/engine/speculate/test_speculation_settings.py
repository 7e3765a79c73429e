"""--speculative-config: vLLM's JSON, resolved with reasons; what cannot be served is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.config.option import options_of
from ridgeline.config.settings import Settings, Speculative, changed, settings_from
from ridgeline.engine.config import resolve
from ridgeline.engine.speculate.config import ResolvedSpeculation
from ridgeline.errors import BadInput, UserError


def resolved(config: dict[str, Any] | None, **settings: Any) -> ResolvedSpeculation | None:
    asked = settings_from({"model": "demo", "speculative_config": config, **settings})
    found = resolve(asked)
    assert "speculative_config" in found.derivations
    assert found.values().keys() >= {"speculative_config"}
    return found.speculative_config


def test_speculation_is_off_by_default() -> None:
    assert resolved(None) is None


def test_defaults_are_made_explicit() -> None:
    found = resolved({"method": "ngram"})
    assert found is not None
    assert found.automatic and found.num_speculative_tokens > 1
    fixed = resolved({"method": "ngram", "num_speculative_tokens": 2})
    assert fixed is not None and not fixed.automatic and fixed.num_speculative_tokens == 2
    assert 1 <= found.prompt_lookup_min <= found.prompt_lookup_max


@pytest.mark.parametrize(
    ("asked", "lengths"),
    [
        ({"prompt_lookup_min": 9}, (9, 9)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 7}, (1, 7)),
    ],
)
def test_lookup_min_must_not_exceed_lookup_max(
    asked: dict[str, int], lengths: tuple[int, int]
) -> None:
    found = resolved({"method": "ngram", **asked})
    assert found is not None
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == lengths


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"method": "psychic"},
        {"method": "ngram", "num_speculative_tokens": 0},
        {"method": "ngram", "num_speculative_tokens": 999},
        {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2},
        {"method": "ngram", "tokens": 5},
    ],
)
def test_bad_configs_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        resolved(config)


def test_drafts_beyond_the_context_are_refused() -> None:
    with pytest.raises(UserError, match="does not fit"):
        resolved({"method": "ngram", "num_speculative_tokens": 20}, max_model_len=16)


@pytest.mark.parametrize("more", [{}, {"num_speculative_tokens": 5}])
@pytest.mark.parametrize("length", [1, 2])
def test_context_too_short_for_a_draft_is_reported_as_given(
    length: int, more: dict[str, int]
) -> None:
    """No number of drafts would fit, and none was requested."""
    with pytest.raises(BadInput) as raised:
        resolved({"method": "ngram", **more}, max_model_len=length)
    error = raised.value
    assert error.value == length and "--max-model-len" in error.what
    assert "3" in str(error.limit) and "num_speculative_tokens" not in str(error)
    least = resolved({"method": "ngram"}, max_model_len=3)
    assert least is not None and least.num_speculative_tokens == 1


def test_flag_reads_json() -> None:
    option = options_of(Settings)["speculative_config"]
    assert option.read('{"method": "ngram"}', "--x") == Speculative(method="ngram")
    for text in ("{", "[1]", "ngram"):
        with pytest.raises(BadInput, match="--x"):
            option.read(text, "--x")


def test_config_round_trips_through_json() -> None:
    settings = settings_from(
        {"model": "demo", "speculative_config": {"method": "ngram", "prompt_lookup_min": 3}}
    )
    assert settings_from(changed(settings)) == settings
