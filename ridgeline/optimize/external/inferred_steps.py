"""Steps of an external server, inferred from what its clients saw, for the simulator and the
roofline.

If prompts may be served from a prefix cache and the server does not report hits, the share that
hits is taken to be `shared_share`: the repeated part of the workload's prompts. The limits of what
can be inferred from outside are described in `ridgeline.diagnose`.
"""

from __future__ import annotations

from ridgeline.config.settings import Settings
from ridgeline.diagnose.losses.observed_steps import infer_steps_from_tokens
from ridgeline.records import RunTrace, StepStat


def infer_steps(
    run: RunTrace, settings: Settings, *, shared_share: float = 0.0
) -> tuple[StepStat, ...]:
    """The steps that explain a run; () if no request streamed token by token."""
    return infer_steps_from_tokens(
        run, cached_share=shared_share if settings.enable_prefix_caching else 0.0
    )
