"""Whether a change of settings had an effect, without mistaking noise for either answer."""

from __future__ import annotations

import random

import pytest

from ridgeline.cli.render.measure.compare import effect_line
from ridgeline.measure.results.comparison import compare_results
from ridgeline.measure.results.result_file import LoadedResult
from ridgeline.measure.results.settings_effect import ONE_RUN, SettingsEffect, settings_effect

THRESHOLD = 0.05


def side(factor: float = 1.0, *, seed: int, noise: float, count: int = 200) -> LoadedResult:
    """Latencies of independent requests, `factor` times as long."""
    rng = random.Random(seed)
    samples = {
        name: tuple(factor * 0.1 * rng.lognormvariate(0, noise) for _ in range(count))
        for name in ("ttft", "tpot", "e2e")
    }
    return LoadedResult(source=f"{seed}", tool="test", samples=samples)


def effect(
    a: list[LoadedResult], b: list[LoadedResult], threshold: float = THRESHOLD
) -> SettingsEffect:
    return settings_effect(compare_results(a, b, threshold=threshold), a, b, threshold)


def test_quiet_equal_sides_had_no_effect() -> None:
    found = effect([side(seed=1, noise=0.1)], [side(seed=2, noise=0.1)])
    assert found.outcome == "unchanged" and found.needed is None
    assert "within ±5%" in found.sentence and found.sentence.endswith(ONE_RUN)


@pytest.mark.slow
def test_noise_is_inconclusive_and_the_remedy_is_named() -> None:
    found = effect([side(seed=1, noise=0.3)], [side(seed=2, noise=0.3)])
    assert found.outcome == "inconclusive"
    assert found.unit == "requests" and found.needed is not None and 200 < found.needed < 2500
    enough = found.needed
    again = [[side(seed=s, noise=0.3, count=enough)] for s in (3, 4)]
    assert effect(*again).outcome == "unchanged"


def repeated(factor: float, *, seed: int, noise: float) -> list[LoadedResult]:
    """Four runs, each of them some 3 % apart from the others."""
    rng = random.Random(seed)
    return [
        side(factor * rng.lognormvariate(0, 0.03), seed=4 * seed + i, noise=noise) for i in range(4)
    ]


@pytest.mark.slow
def test_equal_sides_are_rarely_said_to_differ() -> None:
    """Of 40 pairs, 5 % are two."""
    outcomes = [
        effect(
            repeated(1.0, seed=2 * s, noise=0.1), repeated(1.0, seed=2 * s + 1, noise=0.1)
        ).outcome
        for s in range(40)
    ]
    assert sum(outcome in ("improved", "regressed") for outcome in outcomes) <= 4
    assert "inconclusive" in outcomes


def test_one_run_a_side_never_shows_an_effect() -> None:
    found = effect([side(seed=1, noise=0.05)], [side(1.3, seed=2, noise=0.05)])
    assert found.outcome == "inconclusive" and found.needed is None
    assert "repeat both sides, interleaved" in found.sentence and found.sentence.endswith(ONE_RUN)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.2, 1 / 1.2])
def test_change_beyond_the_threshold_is_never_called_unchanged(factor: float) -> None:
    outcomes = [
        effect(
            repeated(1.0, seed=2 * s, noise=0.1), repeated(factor, seed=2 * s + 1, noise=0.1)
        ).outcome
        for s in range(20)
    ]
    wanted = "regressed" if factor > 1 else "improved"
    assert set(outcomes) <= {wanted, "inconclusive"} and outcomes.count(wanted) >= 15


def test_variation_between_runs_hides_a_small_change() -> None:
    """Requests agree within a run, and runs do not: with runs as observations nothing is known."""
    rng = random.Random(7)
    runs = [side(rng.lognormvariate(0, 0.15), seed=s, noise=0.02) for s in range(6)]
    found = effect(runs[:3], runs[3:])
    assert found.outcome == "inconclusive" and found.unit == "runs"
    assert ONE_RUN not in found.sentence
    steady = [side(seed=s, noise=0.02) for s in range(6)]
    assert effect(steady[:3], steady[3:]).outcome == "unchanged"


def test_the_line_names_the_change() -> None:
    said = {
        outcome: effect_line(SettingsEffect(outcome=outcome, sentence="why"), ["x 1 → 2"])
        for outcome in ("unchanged", "regressed", "inconclusive")
    }
    assert said["unchanged"] == "this change had no effect: x 1 → 2 (why)"
    assert said["regressed"].startswith("this change had an effect: x")
    assert said["inconclusive"].startswith("inconclusive whether this change had an effect")
