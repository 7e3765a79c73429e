"""What ends a sequence, and how its next token is to be sampled."""

from __future__ import annotations

from ridgeline.engine.scheduler.stopping import derive_seed
from ridgeline.records import Event, Finished
from tests.engine.scheduler.helpers import make_request, scheduler, step


def finished(events: list[Event]) -> list[tuple[str, object]]:
    return [(e.reason, e.stop_reason) for e in events if isinstance(e, Finished)]


def test_end_of_sequence_stops_unless_ignored() -> None:
    for ignore, expected in ((False, [("stop", None)]), (True, [])):
        sched = scheduler(eos=(3, 5))
        sched.add(make_request(ignore_eos=ignore))
        assert finished(step(sched, token=5)[1]) == expected


def test_stop_token_is_the_stop_reason() -> None:
    sched = scheduler()
    sched.add(make_request(stop_token_ids=(8, 9)))
    assert finished(step(sched, token=9)[1]) == [("stop", 9)]


def test_max_tokens_is_exact() -> None:
    sched = scheduler()
    sched.add(make_request(max_tokens=3))
    events = [finished(step(sched)[1]) for _ in range(3)]
    assert events == [[], [], [("length", None)]]


def test_full_context_ends_a_sequence() -> None:
    sched = scheduler(max_model_len=9)
    sched.add(make_request(num_prompt=6, max_tokens=None))
    events = [finished(step(sched)[1]) for _ in range(3)]
    assert events == [[], [], [("length", None)]]


def test_min_tokens_bans_end_tokens_until_reached() -> None:
    sched = scheduler(eos=(0, 3))
    sched.add(make_request(min_tokens=2, stop_token_ids=(8, 3)))
    banned = []
    for _ in range(3):
        plan, _ = step(sched)
        assert plan.runs[0].sample is not None
        banned.append(plan.runs[0].sample.banned)
    assert banned == [(0, 3, 8), (0, 3, 8), ()]


def test_greedy_token_is_argmax_once_nothing_is_banned() -> None:
    sched = scheduler(eos=(0, 3))
    sched.add(make_request(min_tokens=2, temperature=0.0))
    runs = [step(sched)[0].runs[0] for _ in range(4)]
    assert [run.is_argmax for run in runs] == [False, False, True, True]


def test_min_tokens_with_ignored_end_of_sequence() -> None:
    sched = scheduler(eos=(0,))
    sched.add(make_request(min_tokens=1, ignore_eos=True, stop_token_ids=(8,)))
    plan, _ = step(sched)
    assert plan.runs[0].sample is not None
    assert plan.runs[0].sample.banned == (8,)


def test_history_is_passed_only_for_penalties() -> None:
    for penalty, expected in ((0.0, ()), (0.5, (100, 101, 7))):
        sched = scheduler()
        sched.add(make_request(num_prompt=2, presence_penalty=penalty))
        step(sched)
        plan, _ = step(sched)
        assert plan.runs[0].sample is not None
        assert plan.runs[0].sample.history == expected
        assert (plan.runs[0].sample.index, plan.runs[0].sample.num_prompt) == (1, 2)


def test_seeds_differ_by_choice_and_repeat_by_request() -> None:
    seeds = [derive_seed(base, index) for base in range(20) for index in range(20)]
    assert len(set(seeds)) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed(5, 0) == derive_seed(5, 0)


def test_requests_without_a_seed_get_different_ones() -> None:
    drawn = []
    for _ in range(2):
        sched = scheduler()
        for name in "ab":
            sched.add(make_request(name, seed=None))
        plan, _ = step(sched)
        drawn.append([run.sample.seed for run in plan.runs if run.sample])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]
