"""The quality panel: verdicts on lossy changes, for `ridgeline eval` and for `optimize`.

  text_comparison    held-out text, paired: perplexity, KL (mean and p99.9), greedy agreement
  quantile_interval  confidence interval of an extreme quantile
  task_questions     generated questions with one right answer: arithmetic, code, recall
  recall             facts in long contexts: what a smaller KV cache loses first
  greedy_divergence  where greedy responses diverge, and whether their lengths drift
  sequential         reads until every threshold is decided, without false passes
  thresholds         quality.toml

A verdict can be "inconclusive". No module here knows an engine: a model is a function from tokens
to the log-probabilities after each of them.
"""

from ridgeline.optimize.quality.greedy_divergence import (
    Divergence,
    LengthDrift,
    divergence,
    length_drift,
)
from ridgeline.optimize.quality.recall import (
    RecallPart,
    RecallReference,
    RecallSource,
    RecallTexts,
)
from ridgeline.optimize.quality.sequential import QualityVerdict, SequentialPanel
from ridgeline.optimize.quality.task_questions import (
    Task,
    TaskPanelPart,
    TaskReference,
    TaskScore,
    make_tasks,
)
from ridgeline.optimize.quality.text_comparison import (
    Array,
    LogprobsOf,
    TextPanelPart,
    TextReference,
    WindowComparison,
    cut_windows,
)
from ridgeline.optimize.quality.thresholds import (
    GateVerdict,
    PanelSize,
    QualityLimits,
    ThresholdCheck,
    load_quality_limits,
)

__all__ = [
    "Array",
    "Divergence",
    "GateVerdict",
    "LengthDrift",
    "LogprobsOf",
    "PanelSize",
    "QualityLimits",
    "QualityVerdict",
    "RecallPart",
    "RecallReference",
    "RecallSource",
    "RecallTexts",
    "SequentialPanel",
    "Task",
    "TaskPanelPart",
    "TaskReference",
    "TaskScore",
    "TextPanelPart",
    "TextReference",
    "ThresholdCheck",
    "WindowComparison",
    "cut_windows",
    "divergence",
    "length_drift",
    "load_quality_limits",
    "make_tasks",
]
