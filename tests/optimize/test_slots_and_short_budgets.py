"""Single slots are raised, and short budgets have room for three trials."""

from __future__ import annotations

import pytest

from ridgeline.optimize.ladder import load_default_ladder, unmet_need
from ridgeline.optimize.time_budget import MAX_ROUNDS, MIN_ROUNDS, MIN_TRIALS, TimeBudget

WORST = {
    "batching": "continuous",
    "max_num_seqs": 1,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": True,
    "speculative_config": None,
    "shared_prompt_share": 0.5,
    "kv_cache_dtype": "auto",
    "quantization": None,
}


@pytest.mark.parametrize("slots", [1, 2, 64])
def test_every_number_of_slots_can_be_raised(slots: int) -> None:
    facts = WORST | {"max_num_seqs": slots}
    raising = [
        rung.id
        for rung in load_default_ladder().rungs
        if any("max_num_seqs" in variant for variant in rung.variants)
        and unmet_need(rung, facts) is None
    ]
    assert raising


def test_short_budget_has_room_for_three_trials() -> None:
    """4m30s on two cores: an answer of the small chat model takes two seconds alone."""
    clock = iter(float(i) * 0 for i in range(10_000))
    budget = TimeBudget(262.0, lambda: next(clock))
    budget.choose_window(2.0)
    budget.note_open(2.0)
    for _ in range(6):
        budget.note_run(budget.window_s + 1.1)
    search_s = 8 * budget.run_cost_s
    trials_s = MIN_TRIALS * budget.trial_cost_s
    assert search_s + trials_s + budget.closing_cost_s < 262.0
    assert MIN_ROUNDS <= budget.max_rounds(0) <= budget.max_rounds(2) <= MAX_ROUNDS
