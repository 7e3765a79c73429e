"""The steps of somebody else's server, from what its clients saw, for the simulator to learn from
and the roofline to place.

Where prompts may have come from a prefix cache and the server does not say how much of them did, it
is taken to be `shared_share`: the share of the workload's prompts that repeats. What can be told
from outside, and what cannot: diagnose/seen_steps.py.
"""

from __future__ import annotations

from ridgeline.config.settings import Settings
from ridgeline.diagnose.seen_steps import seen_steps
from ridgeline.records import RunTrace, StepStat


def infer_steps(
    run: RunTrace, settings: Settings, *, shared_share: float = 0.0
) -> tuple[StepStat, ...]:
    """The steps that explain a run; () where no request brought tokens one by one."""
    return seen_steps(run, cached_share=shared_share if settings.enable_prefix_caching else 0.0)
