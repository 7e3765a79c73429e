"""What must hold after every step of a simulated model's engine."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from ridgeline.engine.scheduler.kv.prefix_cache import PrefixCache
from tests.invariants.checks import check_pool, check_registry
from tests.simulation.models import SimulatedModel


class StepWatch:
    """Checks each step, and calls `stop` at the first one that breaks a rule."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self.num_steps = 0
        self.broken_rules: list[str] = []

    def watch(self, model: SimulatedModel) -> None:
        model.watch_steps(self._after_step)

    def _after_step(self, model: SimulatedModel) -> None:
        self.num_steps += 1
        try:
            check_step(model)
        except AssertionError:
            self.broken_rules.append(traceback.format_exc())
            self._stop()


def check_step(model: SimulatedModel) -> None:
    """The model has read and written what it must, and blocks, queues and requests add up."""
    model.runner.end_step()
    assert not model.runner.violations, model.runner.violations[0]
    world: Any = model
    check_registry(world)
    check_pool(world)
    if isinstance(model.scheduler.cache, PrefixCache):
        model.runner.check_cache(model.scheduler.cache)
    engine_loop = model.engine._loop
    limiter = engine_loop.queue_limiter
    assert limiter.num_queued <= model.setup.max_num_queued_reqs, "the queue exceeds its limit"
    assert set(engine_loop._subscriptions) <= engine_loop._ids
    groups = model.scheduler._registry.groups
    started = {name for name, group in groups.items() if group.started}
    queued = {name for name, request in limiter._requests.items() if request.queued}
    assert not started & queued, "started requests are counted as queued"
    served = set(groups)
    assert served <= set(engine_loop._subscriptions)
    listened = {name for inboxes in model.engine._inboxes.values() for name in inboxes._inboxes}
    model.orphans = {name: model.orphans.get(name, 0) + 1 for name in served - listened}
    assert max(model.orphans.values(), default=0) < 4, "computes for a client that has left"
