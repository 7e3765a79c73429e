"""Settings that interact: found together in the simulator, bounded by trials that failed."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.config.settings import Settings, settings_from
from ridgeline.optimize.external.server_rungs import server_rungs
from ridgeline.optimize.ladder import RungCandidate, candidates_of, load_default_ladder
from ridgeline.optimize.ranking.failure_bounds import FailureBounds, numbers_of
from ridgeline.optimize.ranking.joint_proposals import JointProposals
from ridgeline.optimize.ranking.joint_search import (
    Dimension,
    JointPoint,
    JointSearch,
    dimension_of,
    is_worth_a_trial,
    joint_candidate,
)
from ridgeline.optimize.ranking.predictor import Forecast
from ridgeline.optimize.result import GainPrediction
from ridgeline.optimize.server_settings import FLAGS, ServerSettings, merge_flags

START = settings_from({"model": "demo", "max_num_seqs": 8, "max_num_batched_tokens": 256})
SHARE = "--gpu-memory-utilization"


def rung_dimension(name: str, start: Settings = START) -> tuple[Dimension, list[RungCandidate]]:
    rung = next(rung for rung in load_default_ladder().rungs if rung.id == name)
    options = list(candidates_of(rung, start, {}))
    return dimension_of(rung, options, start), options


def two_peaks(settings: Settings) -> float:
    """Rises only where slots and token budget rise together, up to 48 slots."""
    seqs, tokens = settings.max_num_seqs or 1, settings.max_num_batched_tokens or 1
    useful = min(seqs, tokens / 32)
    return useful if seqs <= 48 else useful * 0.5


def best_of(
    score: Callable[[Settings], float | None], seed: int = 0, points: int = 100
) -> JointPoint | None:
    dimensions = [rung_dimension(name)[0] for name in ("batch-limit", "token-budget")]
    left = [points]

    def may_go_on() -> bool:
        left[0] -= 1
        return left[0] >= 0

    return JointSearch(dimensions, START, score, seed=seed).best([], may_go_on)


def test_variants_of_one_number_span_its_range() -> None:
    slots, options = rung_dimension("batch-limit")
    assert (slots.number, slots.low, slots.high, slots.present) == ("max_num_seqs", 4, 64, 8)
    assert slots.is_integer
    assert slots.change_of(options[0]) == {"max_num_seqs": 4}
    chunks, _ = rung_dimension(
        "chunked-prefill", settings_from({"model": "demo", "enable_chunked_prefill": False})
    )
    assert chunks.number is None and len(chunks.changes) == 3


def test_whole_numbers_of_flags_are_choices_and_shares_are_numbers() -> None:
    """A server takes blocks of 32 or 64 tokens, and no 48; a share of the memory may be any."""
    start = with_share(None)
    rungs = {rung.id: rung for rung in server_rungs("vllm")}
    blocks, share = (
        dimension_of(rungs[name], list(candidates_of(rungs[name], start, {})), start)
        for name in ("vllm-block-size", "vllm-memory-share")
    )
    assert blocks.number is None
    assert (share.number, share.low, share.high) == (SHARE, 0.92, 0.95)
    assert not share.is_integer


def test_two_numbers_that_only_gain_together_are_found() -> None:
    for seed in range(3):
        point = best_of(two_peaks, seed)
        assert point is not None and len(point.parts) == 2
        single = max(
            two_peaks(option.settings)
            for name in ("batch-limit", "token-budget")
            for option in rung_dimension(name)[1]
        )
        assert is_worth_a_trial(point, single)
        candidate = joint_candidate(point, START)
        assert candidate.rung.honesty == "exact"
        assert set(candidate.changes) == {"max_num_seqs", "max_num_batched_tokens"}
        assert candidate.settings == point.settings
        assert "max_num_seqs=" in candidate.label


def test_part_that_adds_nothing_is_dropped() -> None:
    point = best_of(lambda settings: float(settings.max_num_seqs or 1))
    assert point is not None
    assert [dimension.number for dimension, _ in point.parts] == ["max_num_seqs"]
    assert not is_worth_a_trial(point, 1.0), "one rung is tried by itself"


def test_settings_that_cannot_run_are_never_the_best() -> None:
    point = best_of(
        lambda settings: None if (settings.max_num_seqs or 1) > 12 else two_peaks(settings)
    )
    assert point is not None and (point.settings.max_num_seqs or 1) <= 12
    assert best_of(lambda settings: None) is None


def test_no_time_means_no_point() -> None:
    assert best_of(two_peaks, points=0) is None


def with_share(share: str | None, **values: object) -> ServerSettings:
    flags = merge_flags((), {} if share is None else {SHARE: share})
    fields = {name: getattr(START, name) for name in ("model", "max_num_seqs")} | values
    return ServerSettings(**fields, server_flags=flags)  # type: ignore[arg-type]  # checked fields


def test_crash_bounds_what_is_at_least_as_large_and_nothing_smaller() -> None:
    bounds, incumbent = FailureBounds(), with_share("0.9")
    bounds.learn(with_share("0.95", max_num_seqs=64), incumbent)
    assert "0.95" in (bounds.excludes(with_share("0.95", max_num_seqs=64)) or "")
    assert bounds.excludes(with_share("0.97", max_num_seqs=128))
    assert bounds.excludes(with_share("0.97")) is None, "fewer slots may fit"
    assert bounds.excludes(with_share("0.92", max_num_seqs=512)) is None
    smaller_weights = with_share("0.97", max_num_seqs=128, quantization="fp8")
    assert bounds.excludes(smaller_weights) is None, "another format needs other memory"


def test_failure_without_a_larger_number_bounds_nothing() -> None:
    bounds = FailureBounds()
    bounds.learn(with_share(None, quantization="fp8"), with_share(None))
    assert bounds.excludes(with_share(None, quantization="fp8")) is None


@pytest.mark.parametrize(("flag", "value"), [("--x", "fp8"), ("--y", "")])
def test_flags_without_numbers_are_no_numbers(flag: str, value: str) -> None:
    settings = ServerSettings(model="m", server_flags=((flag, value), (SHARE, "0.9")))
    numbers = numbers_of(settings)
    assert flag not in numbers and math.isclose(numbers[SHARE], 0.9)
    assert FLAGS not in numbers


# ---- which points are proposed -----------------------------------------------------------------


class Additive:
    """Stands for the predictor: the score of settings, and that of two rungs together."""

    def __init__(self, together: float) -> None:
        self.together = together

    def score(self, settings: Settings, rate: float, near: object = None) -> float:
        more = (settings.max_num_seqs or 1) > 8
        cached = settings.enable_prefix_caching
        return {(0, 0): 10.0, (1, 0): 12.0, (0, 1): 12.0}.get((more, cached), 10 * self.together)

    def bracket_of(self, settings: Settings) -> None:
        return None

    def forecast(self, incumbent: Settings, option: RungCandidate, rate: float) -> Forecast:
        gain = self.score(option.settings, rate) / self.score(incumbent, rate)
        predicted = GainPrediction(gain=gain, low=gain, high=gain)
        return Forecast(candidate=option, predicted=predicted)

    def is_promising(self, forecast: Forecast) -> bool:
        return True


def proposed(together: float, num_affordable: float) -> list[Forecast]:
    """With slots and prefix caching, each of which gains a fifth alone."""
    start = settings_from({"model": "demo", "max_num_seqs": 8, "enable_prefix_caching": False})
    predictor: Any = Additive(together)
    rungs = {rung.id: rung for rung in load_default_ladder().rungs}
    possible = [
        (rungs[name], list(candidates_of(rungs[name], start, {})))
        for name in ("prefix-caching", "batch-limit")
    ]
    promising = [
        max((predictor.forecast(start, o, 1.0) for o in options), key=lambda f: f.predicted_gain)
        for _, options in possible
    ]
    incumbent: Any = SimpleNamespace(settings=start, rate=1.0)
    joint = JointProposals(predictor, lambda settings: None, seed=0)
    return joint.propose(possible, promising, incumbent, [], num_affordable, lambda: True)


def test_switches_are_joined_only_if_time_is_scarce_or_they_interact() -> None:
    assert not proposed(together=1.2 * 1.2, num_affordable=9)
    assert proposed(together=1.2 * 1.2, num_affordable=2)
    [interacting] = proposed(together=3.0, num_affordable=9)
    assert interacting.candidate.settings.enable_prefix_caching
    assert (interacting.candidate.settings.max_num_seqs or 0) > 8
