"""The batching policies: when a waiting request is admitted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ridgeline.engine.scheduler.batching import POLICIES, QueueView, make_policy
from ridgeline.errors import BadInput
from tests.engine.scheduler.helpers import make_request, names, scheduler, step


def view(**changes: float) -> QueueView:
    defaults = {
        "now_s": 10.0,
        "num_started": 0,
        "num_admitted": 0,
        "max_num_seqs": 4,
        "num_waiting": 1,
        "oldest_arrival_s": 10.0,
        "num_tokens": 8,
    }
    return QueueView(**{**defaults, **changes})


def test_static_admits_only_when_nothing_has_started() -> None:
    policy = make_policy("static")
    assert policy.admits(view())
    assert policy.admits(view(num_admitted=3, num_tokens=0))  # a slot now, tokens in a later step
    assert not policy.admits(view(num_admitted=4))
    assert not policy.admits(view(num_started=1))
    assert (policy.wake_s(view()), policy.wake_s(view(num_started=1))) == (10.0, None)


def test_dynamic_waits_for_a_batch_or_a_timeout() -> None:
    policy = make_policy("dynamic", wait_s=2.0, num_to_start=3)
    assert not policy.admits(view(num_waiting=2))
    assert policy.admits(view(num_waiting=3))
    assert policy.admits(view(oldest_arrival_s=8.0))
    assert policy.admits(view(num_waiting=1, num_admitted=2))  # the batch has started
    assert not policy.admits(view(num_waiting=9, num_started=1))
    assert policy.wake_s(view(num_waiting=2)) == 12.0
    assert policy.wake_s(view(num_waiting=3)) == 10.0
    assert policy.wake_s(view(num_started=1)) is None


def test_dynamic_waits_for_a_full_batch_by_default() -> None:
    policy = make_policy("dynamic", wait_s=2.0)
    assert not policy.admits(view(num_waiting=3))
    assert policy.admits(view(num_waiting=4))


def test_continuous_admits_whenever_there_is_room() -> None:
    policy = make_policy("continuous")
    assert policy.admits(view(num_started=3))
    assert not policy.admits(view(num_started=3, num_admitted=1))
    assert not policy.admits(view(num_tokens=0))
    assert (policy.wake_s(view()), policy.wake_s(view(num_started=4))) == (10.0, None)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_a_single_request(name: str) -> None:
    """Invariant 1 of the family: at once, or at a time it names."""
    policy = make_policy(name, wait_s=3.0)
    alone = view()
    wake_s = policy.wake_s(alone)
    assert wake_s is not None
    assert policy.admits(view(now_s=wake_s))


def test_unknown_policies_and_bad_values_are_rejected() -> None:
    with pytest.raises(BadInput, match="static, dynamic, continuous"):
        make_policy("eager")
    with pytest.raises(BadInput):
        make_policy("dynamic", wait_s=-1.0)
    with pytest.raises(BadInput):
        make_policy("dynamic", wait_s=float("nan"))
    with pytest.raises(BadInput):
        make_policy("dynamic", num_to_start=0)


def test_policies_are_imported_only_when_chosen() -> None:
    code = (
        "import sys, ridgeline.engine.scheduler.scheduler as s;"
        "print([m for m in sys.modules if m.startswith('ridgeline.engine.scheduler.batching.')"
        " and not m.endswith('base')], 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False False"


def test_static_batch_is_admitted_at_once_although_its_prompts_take_steps() -> None:
    sched = scheduler(policy="static", max_num_batched_tokens=8)
    for name in "abcde":
        sched.add(make_request(name, 6))
    _, events = step(sched)
    assert [n for n in names(events) if n.startswith("Started")] == [
        f"Started {name}" for name in "abcd"
    ]
    while sched.stats().num_running:
        _, events = step(sched)
        assert "Started e" not in names(events) or not sched.stats().num_running - 1


def test_dynamic_policy_admits_at_the_wake_time_it_named() -> None:
    sched = scheduler(policy="dynamic", wait_s=2.0)
    sched.add(make_request("a", at_s=1.0))
    plan, _ = step(sched, 1.5)
    assert not plan.runs
    assert sched.next_wake_s(1.5) == 3.0
    plan, _ = step(sched, 3.0)
    assert plan.runs
