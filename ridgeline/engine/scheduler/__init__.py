"""The torch-free control plane: scheduler, KV block pool, prefix cache and batching policies.

    plan = scheduler.plan(now_s)                     what to compute, frozen
    result = runner.run(plan)                        torch, a cost model, or a test script
    events = scheduler.commit(plan, result, now_s)   what happened

Reading order: sequence, plan, scheduler; then queue/ (who waits and who runs), admission/ (who gets
a slot), token_budget (how many tokens), kv/ (where they are stored and what need not be computed),
batching/ and speculation/.
"""

from ridgeline.engine.scheduler.admission.limits import SchedulerLimits
from ridgeline.engine.scheduler.batching import make_policy, seconds_of
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.prefix_cache import NoPrefixCache, PrefixCache
from ridgeline.engine.scheduler.scheduler import Scheduler

__all__ = [
    "BlockPool",
    "NoPrefixCache",
    "PrefixCache",
    "Scheduler",
    "SchedulerLimits",
    "make_policy",
    "seconds_of",
]
