"""The records that every part shares: what was asked, what happened, what was promised."""

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
from ridgeline.records.request import Request, Sampling, Structured
from ridgeline.records.slo import Slo
from ridgeline.records.trace import CountedBy, EngineInfo, RequestTrace, RunTrace, StepStat

__all__ = [
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
    "Request",
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
