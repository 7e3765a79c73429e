"""Records that every part shares: requests, events, traces, SLOs, progress."""

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
    prediction_totals,
)
from ridgeline.records.kv_eviction import KvEviction
from ridgeline.records.kv_transfer import KvTransferParams
from ridgeline.records.profile import OperatorTime, PhaseProfile, ProfiledPhase, StepProfile
from ridgeline.records.request import (
    BeamSearch,
    CachePolicy,
    OutputGrammar,
    Request,
    Sampling,
    SamplingDefaults,
)
from ridgeline.records.slo import Slo
from ridgeline.records.thinking import ThinkingLimit, ThinkingMarks
from ridgeline.records.trace import (
    BUSY_SHARE,
    CountedBy,
    EngineInfo,
    MachineLoad,
    RequestTrace,
    RunTrace,
    StepStat,
)

__all__ = [
    "BUSY_SHARE",
    "BeamSearch",
    "CachePolicy",
    "CountedBy",
    "EngineInfo",
    "Event",
    "Failed",
    "FailureCause",
    "FinishReason",
    "Finished",
    "KvEviction",
    "KvTransferParams",
    "MachineLoad",
    "OperatorTime",
    "OutputGrammar",
    "PhaseProfile",
    "Preempted",
    "ProfiledPhase",
    "Request",
    "RequestTrace",
    "RunTrace",
    "Sampling",
    "SamplingDefaults",
    "Slo",
    "Started",
    "StepProfile",
    "StepStat",
    "ThinkingLimit",
    "ThinkingMarks",
    "Token",
    "TokenLogprobs",
    "Usage",
    "prediction_totals",
]
