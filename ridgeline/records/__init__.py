"""The records that every part shares: what was asked, what happened, what was promised."""

from ridgeline.records.ask import Ask, Sampling, Structured
from ridgeline.records.events import (
    Event,
    Failed,
    FailureCause,
    Finished,
    FinishReason,
    Preempted,
    Started,
    Token,
    TokenLogprobs,
    Usage,
)
from ridgeline.records.profile import OperatorTime, PhaseProfile, ProfiledPhase, StepProfile
from ridgeline.records.slo import Slo
from ridgeline.records.trace import CountedBy, EngineInfo, RequestTrace, RunTrace, StepStat

__all__ = [
    "Ask",
    "CountedBy",
    "EngineInfo",
    "Event",
    "Failed",
    "FailureCause",
    "FinishReason",
    "Finished",
    "OperatorTime",
    "PhaseProfile",
    "Preempted",
    "ProfiledPhase",
    "RequestTrace",
    "RunTrace",
    "Sampling",
    "Slo",
    "Started",
    "StepProfile",
    "StepStat",
    "Structured",
    "Token",
    "TokenLogprobs",
    "Usage",
]
