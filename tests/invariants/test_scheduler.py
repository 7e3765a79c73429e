"""Random operations on the scheduler; `World.check` must hold after every one of them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.invariants.random_operations import add_random, end_random, fork_random
from tests.invariants.world import Setup, World

SETUPS = st.builds(
    Setup,
    num_blocks=st.integers(6, 12),
    block_size=st.sampled_from((1, 2, 4)),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 12),
    chunked=st.booleans(),
    policy=st.sampled_from(("static", "dynamic", "continuous")),
    prefix=st.booleans(),
    ttl_s=st.sampled_from((None, 0.5, 4.0)),
    drafts=st.sampled_from((0, 1, 5)),
    branches=st.sampled_from((0, 0, 3)),
)
# Each place of a sequence takes a block of every group, so these pools are larger.
WINDOWED = st.builds(
    Setup,
    num_blocks=st.integers(14, 40),
    block_size=st.sampled_from((1, 2, 4)),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 12),
    chunked=st.booleans(),
    policy=st.sampled_from(("static", "continuous")),
    prefix=st.booleans(),
    ttl_s=st.sampled_from((None, 0.5, 4.0)),
    drafts=st.sampled_from((0, 1, 5)),
    branches=st.sampled_from((0, 0, 3)),
    window=st.integers(1, 9),
    has_full=st.booleans(),
)


class SchedulerMachine(RuleBasedStateMachine):
    """The setup and the operations are chosen by hypothesis."""

    @initialize(setup=SETUPS | WINDOWED)
    def build(self, setup: Setup) -> None:
        self.world = World(setup)

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        add_random(self.world, lambda low, high: data.draw(st.integers(low, high)))

    @rule(num=st.integers(1, 6))
    def steps(self, num: int) -> None:
        for _ in range(num):
            self.world.step()

    @rule(by_s=st.floats(0.1, 10.0))
    def advance(self, by_s: float) -> None:
        self.world.now_s += by_s

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        end_random(self.world, lambda low, high: data.draw(st.integers(low, high)))

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        fork_random(self.world, lambda low, high: data.draw(st.integers(low, high)))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestScheduler = SchedulerMachine.TestCase
