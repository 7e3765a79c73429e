"""`plan`'s choices against measured ones: the judgement, and the order of well-known layouts.

No measured point is copied here: the cases are what published measurements agree on.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from benchmarks.rank_published import Choice, chosen_by_prediction, regret
from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.predict import Prediction, predict

ROWS = load_catalogue()
ROOMY = {name: replace(row, memory_bytes=10**15) for name, row in ROWS.items()}


def choice(measured: tuple[float, float], predicted: tuple[float, float]) -> Choice:
    """(seconds per token, tokens per second and device), measured and predicted."""
    return Choice(*measured, *predicted)


SLOW_LIMIT, TIGHT_LIMIT = 0.05, 0.012
LARGE = choice((0.040, 1000.0), (0.030, 900.0))
SMALL = choice((0.010, 500.0), (0.011, 400.0))
TRAP = choice((0.045, 600.0), (0.020, 1200.0))


def test_choice_is_the_fastest_of_those_predicted_within_the_limit() -> None:
    assert chosen_by_prediction([LARGE, SMALL], SLOW_LIMIT) is LARGE
    assert chosen_by_prediction([LARGE, SMALL], TIGHT_LIMIT) is SMALL
    assert chosen_by_prediction([LARGE], TIGHT_LIMIT) is None


def test_regret_is_the_measured_share_that_the_choice_loses() -> None:
    assert regret([LARGE, SMALL], SLOW_LIMIT) == 0
    assert regret([LARGE, SMALL, TRAP], SLOW_LIMIT) == pytest.approx(0.4)
    assert regret([SMALL, TRAP], TIGHT_LIMIT) == 0


def test_choice_that_misses_the_limit_loses_everything() -> None:
    late = choice((0.060, 2000.0), (0.040, 2000.0))
    assert regret([LARGE, late], SLOW_LIMIT) == 1
    barely = choice((0.054, 2000.0), (0.040, 2000.0))
    slow = choice((0.040, 100.0), (0.030, 50.0))
    assert regret([SMALL, slow, barely], SLOW_LIMIT) == 0
    pessimistic = choice((0.011, 400.0), (0.020, 400.0))
    assert regret([pessimistic, LARGE], TIGHT_LIMIT) == 1


def test_case_that_no_choice_can_lose_does_not_count() -> None:
    assert regret([LARGE, choice((0.041, 990.0), (0.030, 1.0))], SLOW_LIMIT) is None
    assert regret([LARGE], TIGHT_LIMIT) is None


def best(points: list[OperatingPoint], limit_ms: float) -> OperatingPoint:
    """The point with the most tokens per device of those within the limit."""
    within = {point: predict(point, ROOMY) for point in points}
    met = {point: at for point, at in within.items() if at.tpot_ms <= limit_ms}
    return max(met, key=lambda point: rate_per_device(point, met[point]))


def rate_per_device(point: OperatingPoint, at: Prediction) -> float:
    seconds = (at.ttft_ms + (point.osl - 1) * at.tpot_ms) / 1000
    return point.batch * point.osl / seconds / (point.tp * point.attention_dp)


def points(**fields: object) -> list[OperatingPoint]:
    base = {"model": "llama-3.1-70b", "device": "h100-sxm", "isl": 1024, "osl": 1024}
    base |= {"backend": "trtllm", "weight_dtype": "fp8"}
    return [
        OperatingPoint(**{**base, **fields, "tp": tp, "batch": batch})  # type: ignore[arg-type]
        for tp in (1, 2, 4, 8)
        for batch in (1, 4, 16, 64, 128, 256)
    ]


def test_loose_limits_choose_few_devices_with_large_batches_and_tight_ones_many() -> None:
    loose, tight = best(points(), 60.0), best(points(), 14.0)
    assert loose.tp <= 2 and loose.batch >= 64
    assert tight.tp >= 4 and tight.batch < loose.batch


def test_small_model_gains_nothing_from_tensor_parallelism_under_a_loose_limit() -> None:
    assert best(points(model="llama-3.1-8b"), 40.0).tp == 1


def test_narrower_weights_carry_more_within_the_same_limit() -> None:
    rates = []
    for weights in ("bfloat16", "fp8"):
        chosen = best(points(weight_dtype=weights), 25.0)
        rates.append(rate_per_device(chosen, predict(chosen, ROOMY)))
    assert rates[1] > 1.2 * rates[0]


def test_data_parallel_attention_wins_at_large_batches_of_latent_attention() -> None:
    """Every tensor-parallel device holds the whole latent cache, and reads all of it."""
    shared = {"model": "deepseek-v3", "device": "h200-sxm", "isl": 4096, "osl": 1024}
    shared |= {"backend": "sglang", "weight_dtype": "fp8-block", "batch": 1024}
    tensor = OperatingPoint(**shared, tp=8, ep=8)  # type: ignore[arg-type]
    data = OperatingPoint(**shared, tp=1, attention_dp=8, ep=8)  # type: ignore[arg-type]
    assert predict(data, ROOMY).tpot_ms < predict(tensor, ROOMY).tpot_ms
