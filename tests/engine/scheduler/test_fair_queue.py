"""Accounts that wait are served in proportion to their shares, whatever they send."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ridgeline.engine.scheduler import (
    BlockPool,
    NoPrefixCache,
    Scheduler,
    SchedulerLimits,
    make_policy,
)
from ridgeline.engine.scheduler.admission.queue_limits import QueueLimiter, QueueLimits
from ridgeline.engine.scheduler.plan import RunOutput, StepResult
from ridgeline.errors import EngineFull
from ridgeline.records import Finished, Request, Sampling, Started, Token
from tests.invariants.checks import check_pool, check_registry


class Server:
    """A scheduler whose steps take one second each; `served` counts output tokens by account."""

    def __init__(self, *, max_num_seqs: int = 4, num_blocks: int = 200) -> None:
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=256
        )
        self.pool = BlockPool(num_blocks, 4)
        policy = make_policy("continuous", wait_s=1.0)
        self.scheduler = Scheduler(limits, policy, self.pool, NoPrefixCache())
        self.now_s, self.num_added = 0.0, 0
        self.account_of: dict[str, str] = {}
        self.served: Counter[str] = Counter()
        self.started_s: dict[str, float] = {}
        self.ended: list[str] = []

    @property
    def running(self) -> list[object]:
        return self.scheduler.running

    @property
    def setup(self) -> SchedulerLimits:
        return self.scheduler.limits

    def add(
        self,
        account: str,
        *,
        share: float = 1.0,
        num_prompt: int = 8,
        max_tokens: int = 8,
        priority: int = 0,
        n: int = 1,
    ) -> str:
        name = f"{account}-{self.num_added}"
        self.num_added += 1
        self.account_of[name] = account
        self.scheduler.add(
            Request(
                id=name,
                prompt=tuple(range(1, num_prompt + 1)),
                sampling=Sampling(max_tokens=max_tokens, ignore_eos=True, n=n, seed=1),
                arrival_s=self.now_s,
                account=account,
                share=share,
                priority=priority,
            )
        )
        return name

    def step(self) -> None:
        plan = self.scheduler.plan(self.now_s)
        self.now_s += 1.0
        outputs = tuple(RunOutput((7,) if run.sample else ()) for run in plan.runs)
        for event in self.scheduler.commit(plan, StepResult(outputs), self.now_s):
            if isinstance(event, Token):
                self.served[self.account_of[event.request_id]] += 1
            elif isinstance(event, Started):
                self.started_s[event.request_id] = event.at_s
            elif isinstance(event, Finished):
                self.ended.append(event.request_id)
        check_registry(self)  # type: ignore[arg-type]
        check_pool(self)  # type: ignore[arg-type]


def test_flood_of_one_account_does_not_delay_another() -> None:
    server = Server()
    for _ in range(500):
        server.add("flood")
    for _ in range(30):
        server.step()
    began_s = server.now_s
    name = server.add("victim")
    while name not in server.ended:
        server.step()
    # Slots become free every few steps; in order of arrival it would be after some 900 steps.
    assert server.started_s[name] - began_s <= 10
    assert server.now_s - began_s <= 20


@pytest.mark.parametrize("share", [0.5, 1.0, 3.0])
def test_waiting_accounts_are_served_in_proportion_to_their_shares(share: float) -> None:
    server, rng = Server(), random.Random(4)
    for _ in range(600):
        server.add("a", share=share, max_tokens=rng.choice((2, 8, 20)))
        server.add("b", num_prompt=rng.choice((2, 20)), max_tokens=4)
    for _ in range(400):
        server.step()
    in_queue = server.scheduler._registry.lanes[0].unstarted._served
    assert in_queue["a"] == pytest.approx(in_queue["b"], rel=0.1)
    assert min(server.served.values()) > 100


def test_number_of_requests_does_not_increase_a_share() -> None:
    server = Server(max_num_seqs=2)
    for account, count in (("many", 300), ("few", 100)):
        for _ in range(count):
            server.add(account)
    for _ in range(200):
        server.step()
    assert server.served["few"] == pytest.approx(server.served["many"], rel=0.1)


def test_idle_account_saves_up_nothing() -> None:
    server = Server(max_num_seqs=1)
    for _ in range(100):
        server.add("busy")
    for _ in range(200):
        server.step()
    before = server.served["busy"]
    for _ in range(100):
        server.add("late")
    for _ in range(200):
        server.step()
    assert server.served["busy"] - before == pytest.approx(server.served["late"], rel=0.2)


def test_more_urgent_priority_still_goes_first() -> None:
    server = Server(max_num_seqs=1)
    for _ in range(20):
        server.add("a")
    server.step()
    names = [server.add("a", priority=-1), server.add("b"), server.add("b", priority=-1)]
    while server.scheduler.has_work:
        server.step()
    assert set(server.ended[1:3]) == {names[0], names[2]}


def test_overtaking_request_is_not_pushed_back_by_those_it_has_overtaken() -> None:
    """With too few blocks, what is preempted resumes before the flood that arrived earlier."""
    server = Server(max_num_seqs=4, num_blocks=24)
    for _ in range(200):
        server.add("flood", max_tokens=40)
    for _ in range(20):
        server.step()
    began_s, name = server.now_s, server.add("victim", max_tokens=40, n=2)
    while server.ended.count(name) < 2:
        server.step()
        assert server.now_s - began_s < 400, "the victim starves"


def test_single_account_keeps_the_order_of_arrival_and_priority() -> None:
    server, rng = Server(max_num_seqs=1), random.Random(1)
    names = {}
    for _ in range(30):
        priority = rng.choice((-1, 0, 1))
        names[server.add("a", priority=priority, max_tokens=1)] = priority
    while server.scheduler.has_work:
        server.step()
    assert [names[name] for name in server.ended] == sorted(names.values())


def test_one_account_cannot_fill_the_queue() -> None:
    limiter = QueueLimiter(QueueLimits(max_requests=100, max_tokens=10_000))
    with pytest.raises(EngineFull, match="for this API key") as caught:
        for index in range(100):
            limiter.admit(f"flood{index}", 10, None, 0.0, "flood")
    assert caught.value.reason == "account" and limiter.num_queued == 75
    for index in range(10):
        limiter.admit(f"other{index}", 10, None, 0.0, "other")
    for index in range(75):
        limiter.remove(f"flood{index}")
    assert limiter.num_queued == 10 and not limiter._queued_of["flood"]
    with pytest.raises(EngineFull, match="for this API key"):
        for index in range(20):
            limiter.admit(f"large{index}", 1000, None, 0.0, "flood")


def test_without_accounts_the_whole_queue_can_be_used() -> None:
    limiter = QueueLimiter(QueueLimits(max_requests=100))
    for index in range(100):
        limiter.admit(str(index), 10, None, 0.0)
    with pytest.raises(EngineFull, match="--max-num-queued-reqs"):
        limiter.admit("more", 10, None, 0.0)
