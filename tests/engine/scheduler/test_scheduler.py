"""The scheduler, one rule at a time.

Its invariants under random operations are in tests/invariants.
"""

from __future__ import annotations

import pytest

from ridgeline.engine.scheduler.plan import StepResult
from ridgeline.records import Failed, Finished, Started, Token
from tests.engine.scheduler.helpers import make_request, names, scheduler, scripted, shapes, step


def test_a_prompt_is_computed_in_chunks_then_one_token_at_a_time() -> None:
    sched = scheduler(max_num_batched_tokens=4)
    sched.add(make_request(num_prompt=10, max_tokens=2))
    seen = []
    while sched.has_work:
        plan, events = step(sched)
        seen.append((shapes(plan), plan.runs[0].sample is not None, names(events)))
    assert seen == [
        ([(0, 4)], False, ["Started a"]),
        ([(4, 4)], False, []),
        ([(8, 2)], True, ["Token a.0"]),
        ([(10, 1)], True, ["Token a.0", "Finished a.0"]),
    ]


def test_prompts_are_batched_with_decodes() -> None:
    sched = scheduler(max_num_batched_tokens=8)
    sched.add(make_request("a", 6))
    step(sched)
    sched.add(make_request("b", 20))
    plan, _ = step(sched)
    assert shapes(plan) == [(6, 1), (0, 7)]


def test_long_prompt_in_front_does_not_stall_decodes() -> None:
    sched = scheduler(max_num_batched_tokens=8, aging_s=10.0)
    sched.add(make_request("late", 4))
    step(sched)
    sched.add(make_request("urgent", 20, priority=-1))
    step(sched)
    plan, _ = step(sched)
    assert shapes(plan) == [(7, 7), (5, 1)]


def test_whole_prompts_are_not_split() -> None:
    sched = scheduler(max_num_batched_tokens=8, chunked_prefill=False)
    for name, num_prompt in (("a", 20), ("b", 5), ("c", 5)):
        sched.add(make_request(name, num_prompt))
    assert [shapes(step(sched)[0]) for _ in range(3)] == [
        [(0, 20)],
        [(20, 1), (0, 5)],
        [(21, 1), (5, 1), (0, 5)],
    ]


def test_run_lists_only_the_blocks_it_needs() -> None:
    sched = scheduler(max_num_batched_tokens=4, block_size=4)
    sched.add(make_request(num_prompt=10))
    assert [len(step(sched)[0].runs[0].blocks) for _ in range(3)] == [1, 2, 3]


def test_slots_are_limited_and_taken_in_order_of_priority() -> None:
    sched = scheduler(max_num_seqs=2)
    for name, priority in (("a", 0), ("b", 1), ("c", -1)):
        sched.add(make_request(name, 2, priority=priority))
    _, events = step(sched)
    assert [e.request_id for e in events if isinstance(e, Started)] == ["c", "a"]
    assert (sched.stats().num_running, sched.stats().num_waiting) == (2, 1)


def test_urgent_requests_cannot_starve_a_patient_one() -> None:
    sched = scheduler(max_num_seqs=1, aging_s=10.0)
    sched.add(make_request("patient", 2, priority=1, max_tokens=1))
    for i in range(100):  # one urgent request per second, each takes a second
        sched.add(make_request(f"urgent{i}", 2, at_s=float(i), max_tokens=1))
        _, events = step(sched, float(i))
        if "Started patient" in names(events):
            break
    assert i == 10  # a head start of ten seconds, and no more


def test_last_in_order_is_preempted_and_resumes() -> None:
    sched = scheduler(num_blocks=4, block_size=4, max_num_batched_tokens=16)
    sched.add(make_request("a", 4, max_tokens=9))
    sched.add(make_request("b", 4, max_tokens=9, first=200))
    seen = []
    while sched.has_work:
        _, events = step(sched)
        seen += names(events)
    assert "Preempted b.0" in seen
    assert "Preempted a.0" not in seen
    assert seen.count("Token b.0") == seen.count("Token a.0") == 9
    assert seen.index("Finished a.0") < seen.index("Finished b.0")
    assert seen.count("Started b") == 1


def test_preempted_sequence_recomputes_its_output_and_continues() -> None:
    sched = scheduler(num_blocks=4, block_size=4)
    sched.add(make_request("a", 4, max_tokens=9))
    sched.add(make_request("b", 4, max_tokens=9, first=200))
    runs = []
    while sched.has_work:
        plan, _ = step(sched)
        runs += [run for run in plan.runs if run.seq_id == 1]
    again = next(run for run in runs[1:] if run.start == 0)
    assert again.tokens[:4] == (200, 201, 202, 203)
    assert set(again.tokens[4:]) == {7}
    indices = [run.sample.index for run in runs if run.sample]
    assert indices == list(range(9))


def test_prefix_hits_skip_cached_blocks() -> None:
    sched = scheduler(prefix=True)
    sched.add(make_request("a", 10, max_tokens=1))
    step(sched)
    sched.add(make_request("b", 10, max_tokens=1))
    plan, events = step(sched)
    assert shapes(plan) == [(8, 2)]
    assert isinstance(events[0], Started)
    assert events[0].cached_tokens == 8
    assert isinstance(events[-1], Finished)
    assert events[-1].usage.cached_tokens == 8
    assert (sched.stats().queried_tokens, sched.stats().hit_tokens) == (10, 8)
    assert (sched.cache.queried_tokens, sched.cache.hit_tokens) == (20, 8)


def test_recomputation_may_hit_but_is_not_counted() -> None:
    sched = scheduler(num_blocks=4, block_size=4, prefix=True)
    sched.add(make_request("a", 4, max_tokens=9))
    sched.add(make_request("b", 4, max_tokens=9, first=200))
    while sched.has_work:
        step(sched)
    assert sched.totals.num_preempted
    assert sched.cache.queried_tokens == 8


def test_choices_fork_from_the_prompt_and_copy_on_write() -> None:
    sched = scheduler(max_num_batched_tokens=16)
    sched.add(make_request(num_prompt=6, n=3, max_tokens=2))
    plan, _ = step(sched)
    assert shapes(plan) == [(0, 6)]
    shared = plan.runs[0].blocks
    plan, events = step(sched)
    assert shapes(plan) == [(6, 1), (5, 1), (5, 1)]
    assert [run.blocks[0] for run in plan.runs] == [shared[0]] * 3
    assert len({run.blocks[1] for run in plan.runs}) == 3
    assert {origin for origin, _ in plan.copies} == {shared[1]}
    assert len({run.sample.seed for run in plan.runs if run.sample}) == 3
    assert names(events)[:3] == ["Token a.0", "Finished a.0", "Token a.1"]


def test_choices_beyond_the_slots_run_later() -> None:
    sched = scheduler(max_num_seqs=2)
    sched.add(make_request(num_prompt=6, n=5, max_tokens=2))
    seen = []
    while sched.has_work:
        assert sched.stats().num_running <= 2
        seen += names(step(sched)[1])
    assert sorted(n for n in seen if n.startswith("Fin")) == [f"Finished a.{i}" for i in range(5)]


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_choices_fork_even_if_the_first_ends_at_once(max_tokens: int) -> None:
    sched = scheduler()
    sched.add(make_request(num_prompt=6, n=3, max_tokens=max_tokens))
    step(sched)
    plan, _ = step(sched)
    assert [shape for shape in shapes(plan) if shape[0] == 5] == [(5, 1), (5, 1)]


def test_fork_splits_a_choice_mid_answer() -> None:
    sched = scheduler()
    sched.add(make_request(num_prompt=6, max_tokens=4))
    step(sched)
    step(sched)
    assert sched.fork("a", 0) == 1
    plan, events = step(sched)
    assert shapes(plan) == [(7, 1), (7, 1)]
    assert [run.tokens for run in plan.runs] == [(7,), (7,)]
    assert len(plan.copies) == 1
    assert names(events) == ["Token a.0", "Token a.1"]
    _, events = step(sched)
    assert names(events) == ["Token a.0", "Finished a.0", "Token a.1", "Finished a.1"]


def test_cancel_frees_everything_at_once() -> None:
    sched = scheduler()
    sched.add(make_request("a", n=3))
    sched.add(make_request("b"))
    step(sched)
    step(sched)
    events = sched.cancel("a", 5.0)
    assert names(events) == [f"Finished a.{i}" for i in range(3)]
    assert {event.at_s for event in events} == {5.0}
    assert sched.cancel("b")
    assert sched.cancel("b") == sched.cancel("unknown") == []
    assert (sched.pool.num_owned, sched.has_work) == (0, False)


def test_cancel_between_plan_and_commit() -> None:
    sched = scheduler()
    sched.add(make_request("a"))
    sched.add(make_request("b"))
    plan = sched.plan(0.0)
    sched.cancel("a")
    events = sched.commit(plan, scripted(plan), 1.0)
    assert [n for n in names(events) if n.endswith("a.0")] == []
    assert "Token b.0" in names(events)


def test_cancel_before_the_prompt_is_computed_ends_every_choice() -> None:
    sched = scheduler()
    sched.add(make_request("a", n=3))
    assert names(sched.cancel("a")) == [f"Finished a.{i}" for i in range(3)]


def test_finish_ends_a_sequence_from_outside() -> None:
    sched = scheduler()
    sched.add(make_request("a", n=2))
    step(sched)
    step(sched)
    (event,) = sched.finish("a", 1, stop_reason="END", now_s=3.0)
    assert isinstance(event, Finished)
    assert (event.reason, event.stop_reason, event.at_s) == ("stop", "END", 3.0)
    assert event.usage.completion_tokens == 1
    assert sched.finish("a", 1) == sched.finish("b", 0) == []
    assert shapes(sched.plan(0.0)) == [(7, 1)]


def test_a_request_whose_deadline_passes_fails() -> None:
    sched = scheduler(max_num_seqs=1)
    sched.add(make_request("a", max_tokens=50))
    sched.add(make_request("b", deadline_s=5.0))
    step(sched, 4.9)
    _, events = step(sched, 5.0)
    assert [e.request_id for e in events if isinstance(e, Failed)] == ["b"]
    assert sched.stats().num_waiting == 0


def test_deadline_wakes_a_request_that_waits_for_a_batch() -> None:
    sched = scheduler(policy="dynamic", wait_s=60.0)
    sched.add(make_request("a", deadline_s=5.0))
    assert sched.next_wake_s(1.0) == 5.0
    step(sched, 5.0)
    assert not sched.has_work
    assert sched.next_wake_s(5.0) is None


def test_prompt_logprobs_come_with_the_first_token_and_skip_the_cache() -> None:
    sched = scheduler(prefix=True, max_num_batched_tokens=4)
    sched.add(make_request("warm", 10, max_tokens=1))
    sched.add(make_request("a", 10, prompt_logprobs=2, n=2, max_tokens=2))
    tokens = []
    while sched.has_work:
        _, events = step(sched)
        tokens += [e for e in events if isinstance(e, Token) and e.request_id == "a"]
    first, *rest = tokens
    assert first.prompt_logprobs is not None
    assert [e and e.token for e in first.prompt_logprobs] == [None, *range(101, 110)]
    assert [e.prompt_logprobs for e in rest] == [None] * 3
    assert sched.cache.queried_tokens == 10


def test_runs_name_the_requested_prompt_positions() -> None:
    sched = scheduler(max_num_batched_tokens=9)
    sched.add(make_request(num_prompt=10, prompt_logprobs=0))
    runs = [step(sched)[0].runs[0] for _ in range(3)]
    assert [(run.prompt_logprobs, run.next_prompt_token) for run in runs] == [
        (0, 109),
        (None, None),  # the last prompt token predicts the output
        (None, None),
    ]


def test_an_empty_plan_may_be_committed() -> None:
    sched = scheduler()
    plan = sched.plan(0.0)
    assert sched.commit(plan, StepResult(()), 0.0) == []
    assert sched.totals.num_steps == 0


def test_admission_leaves_each_running_sequence_a_block_to_grow_into() -> None:
    sched = scheduler(num_blocks=6, block_size=4, max_num_seqs=4)
    sched.add(make_request("a", 8, max_tokens=8))
    sched.add(make_request("b", 12, max_tokens=4))
    sched.add(make_request("c", 1, max_tokens=1))
    step(sched)
    assert sched.stats().num_running == 2  # 2 + 3 of 6 blocks, and one left for a to grow into
    step(sched)
    assert sched.stats().num_running == 2
    assert sched.totals.num_preempted == 0
