"""The torch-free control plane: scheduler, blocks, prefix cache, batching policies.

    plan = scheduler.plan(now_s)                     what to compute, frozen
    result = runner.run(plan)                        torch, a cost model, or a test's script
    events = scheduler.commit(plan, result, now_s)   what happened

Reading order: sequence, plan, scheduler; then roster (who sits where), queue (who goes first),
budget (how many tokens), tables and blocks (where they live), prefix (what need not be computed),
batching.
"""

from ridgeline.engine.core.admission import Limits
from ridgeline.engine.core.batching import make_policy
from ridgeline.engine.core.blocks import BlockPool
from ridgeline.engine.core.prefix import NoPrefixCache, PrefixCache
from ridgeline.engine.core.scheduler import Scheduler

__all__ = ["BlockPool", "Limits", "NoPrefixCache", "PrefixCache", "Scheduler", "make_policy"]
