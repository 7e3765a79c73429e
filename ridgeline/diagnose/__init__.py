"""Diagnosis: what bounds a run, which causes cost it latency, and how to fix them.

No torch, no clock.
"""

from ridgeline.diagnose.facts import engine_facts, facts_of
from ridgeline.diagnose.losses.gpu_losses import split_gpu_losses
from ridgeline.diagnose.losses.latency_losses import LatencyLosses, attribute_latency
from ridgeline.diagnose.losses.server_losses import attribute_server_latency
from ridgeline.diagnose.losses.step_facts import batch_facts, missed_prefix, step_facts
from ridgeline.diagnose.roofline.phase_points import TimeShares, roofline_points, time_shares
from ridgeline.diagnose.rules.advice import Advice, advise
from ridgeline.diagnose.rules.alerts import AlertRule, AlertRules, alert_rules
from ridgeline.diagnose.rules.findings import RankedFinding, findings
from ridgeline.diagnose.rules.rulebook import Bound, Rule
from ridgeline.diagnose.rules.verdict import Finding, verdict, verdict_of_point

__all__ = [
    "Advice",
    "AlertRule",
    "AlertRules",
    "Bound",
    "Finding",
    "LatencyLosses",
    "RankedFinding",
    "Rule",
    "TimeShares",
    "advise",
    "alert_rules",
    "attribute_latency",
    "attribute_server_latency",
    "batch_facts",
    "engine_facts",
    "facts_of",
    "findings",
    "missed_prefix",
    "roofline_points",
    "split_gpu_losses",
    "step_facts",
    "time_shares",
    "verdict",
    "verdict_of_point",
]
