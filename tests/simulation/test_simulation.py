"""Whole-system simulation: every invariant holds for every seed, and a seed repeats its run."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import pytest

from tests.simulation.batch_lives import simulate_batches
from tests.simulation.simulation import simulate

NUM_SEEDS = int(os.environ.get("SIMULATION_SEEDS", "150"))
FIRST_SEED = int(os.environ.get("SIMULATION_SEED", "0"))
GROUP = 5
MAX_GROWTH_BYTES = 16 << 20
NUM_BATCH_SEEDS = max(4, NUM_SEEDS // 12)


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS, GROUP))
def test_invariants_hold_for_every_seed(first: int) -> None:
    for seed in range(first, min(first + GROUP, FIRST_SEED + NUM_SEEDS)):
        simulate(seed)


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_BATCH_SEEDS))
def test_batches_survive_every_death_of_the_server(seed: int) -> None:
    simulate_batches(seed)


def test_a_choice_without_tokens_is_resumed_next_to_one_that_has_some() -> None:
    """Of n = 2, killed before the second choice began, and preempted once it had."""
    simulate_batches(300565)


@pytest.mark.parametrize("seed", [900081, 900128])
def test_a_resumed_request_waits_with_several_choices(seed: int) -> None:
    """Only one of them stands for the request in the queue."""
    simulate_batches(seed)


def test_an_engine_may_die_after_the_last_client_has_left() -> None:
    """The server notices up to a tenth of a second later, and stops then."""
    assert "the scheduler breaks" in "\n".join(simulate(200177).trace)


@pytest.mark.parametrize("seed", [300839, 302344])
def test_the_first_signal_cuts_nothing_off_that_a_dead_engine_left(seed: int) -> None:
    """The server drains already then: answers of its other models still end."""
    simulate(seed)


@pytest.mark.parametrize("seed", [3, 4, 17])
def test_a_seed_repeats_its_run(seed: int) -> None:
    assert simulate(seed).trace == simulate(seed).trace


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_servers_and_requests() -> None:
    for seed in range(10):  # imports, routes and pools of memory
        simulate(seed)
    gc.collect()
    before = resident_bytes()
    for seed in range(10, 40):
        simulate(seed)
    gc.collect()
    assert resident_bytes() - before < MAX_GROWTH_BYTES


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def test_random_setups_reach_every_kind_of_end() -> None:
    """Otherwise the invariants would hold because nothing happens."""
    traces = "\n".join("\n".join(simulate(seed).trace) for seed in range(30))
    for end in (
        "whole",
        "cut",
        "error 503",
        "error 408",
        "error 429",
        "error 500",
        "malformed 400",
        "error 400",
        "a renderer dies",
        "a renderer hangs",
        "a renderer dies between conversations",
        "other whole",
        "tuned whole",
        "tuned-2 error 404",
    ):
        assert end in traces, end
