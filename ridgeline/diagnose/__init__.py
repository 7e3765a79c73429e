"""From a run's records to what bounds it and what would mend it. No torch, no clock."""

from ridgeline.diagnose.facts import engine_facts, facts_of
from ridgeline.diagnose.losses.gpu_losses import with_gpu
from ridgeline.diagnose.losses.latency_losses import Blame, blame
from ridgeline.diagnose.losses.server_losses import blame_server
from ridgeline.diagnose.losses.step_facts import batch_facts, missed_prefix, step_facts
from ridgeline.diagnose.roofline.phase_points import TimeShares, roofline_points, time_shares
from ridgeline.diagnose.rules.causes import Ranked, findings
from ridgeline.diagnose.rules.rules import Advice, Rule, advise
from ridgeline.diagnose.rules.verdict import Bound, Finding, verdict, verdict_of_point

__all__ = [
    "Advice",
    "Blame",
    "Bound",
    "Finding",
    "Ranked",
    "Rule",
    "TimeShares",
    "advise",
    "batch_facts",
    "blame",
    "blame_server",
    "engine_facts",
    "facts_of",
    "findings",
    "missed_prefix",
    "roofline_points",
    "step_facts",
    "time_shares",
    "verdict",
    "verdict_of_point",
    "with_gpu",
]
